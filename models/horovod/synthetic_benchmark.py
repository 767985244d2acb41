"""Images a second of a model on random pixels, on one rank and on all.

    ctlrun -np 2 python -m models.horovod.synthetic_benchmark --model=SmallCNN --batch-size=32

`--model` is SmallCNN, or any model of keras.applications, built with random weights.
"""

import argparse
import timeit

import ctl.hvd as hvd
import keras
import numpy as np
import tensorflow as tf


def main(argv=None):
    """Measures the images per second of all ranks."""
    flags = _flags().parse_args(argv)
    hvd.init()
    if flags.no_cuda:
        tf.config.set_visible_devices([], "GPU")
    gpus = tf.config.get_visible_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    model = _model(flags.model, flags.image_size)
    optimizer = keras.optimizers.SGD(0.01)
    data = tf.random.uniform([flags.batch_size, flags.image_size, flags.image_size, 3])
    target = tf.random.uniform([flags.batch_size], maxval=1000, dtype=tf.int64)
    losses = keras.losses.SparseCategoricalCrossentropy()
    compression = hvd.Compression.fp16 if flags.fp16_allreduce else hvd.Compression.none

    @tf.function
    def benchmark_step(first_batch):
        with tf.GradientTape() as tape:
            loss = losses(target, model(data, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)

    def log(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    device = "GPU" if gpus else "CPU"
    log(f"Model: {flags.model}\nBatch size: {flags.batch_size}\nNumber of {device}s: {hvd.size()}")
    benchmark_step(first_batch=True)
    timeit.timeit(lambda: benchmark_step(first_batch=False), number=flags.num_warmup_batches)
    rates = []
    for i in range(flags.num_iters):
        time = timeit.timeit(
            lambda: benchmark_step(first_batch=False), number=flags.num_batches_per_iter
        )
        rates.append(flags.batch_size * flags.num_batches_per_iter / time)
        log(f"Iter #{i}: {rates[-1]:.1f} img/sec per {device}")
    mean, spread = float(np.mean(rates)), 1.96 * float(np.std(rates))
    log(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
    total, total_spread = hvd.size() * mean, hvd.size() * spread
    log(f"Total img/sec on {hvd.size()} {device}(s): {total:.1f} +-{total_spread:.1f}")


def _model(name, image_size):
    shape = (image_size, image_size, 3)
    if name != "SmallCNN":
        return getattr(keras.applications, name)(weights=None, input_shape=shape)
    return keras.Sequential(
        [
            keras.layers.Input(shape),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(1000, activation="softmax"),
        ]
    )


def _flags():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fp16-allreduce", action="store_true", help="compress gradients on the way"
    )
    parser.add_argument("--model", default="ResNet50", help="SmallCNN, or of keras.applications")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    return parser


if __name__ == "__main__":
    main()
