"""MNIST with a gradient tape, one process per rank, as scripts for Horovod are written.

ctlrun -np 2 python -m models.horovod.mnist_tape --steps=200
"""

import argparse

import ctl.hvd as hvd
import keras
import tensorflow as tf

from models.data import digits


def main(argv=None):
    """Trains on all ranks."""
    flags = _flags().parse_args(argv)
    hvd.init()
    _one_gpu_each()
    keras.utils.set_random_seed(flags.seed)
    data = digits.load(flags.data)

    model = _model()
    compression = getattr(hvd.Compression, flags.compression)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(hvd.scale_learning_rate(flags.learning_rate))
    dataset = (
        hvd.shard(tf.data.Dataset.from_tensor_slices(tuple(data["train"].values())))
        .shuffle(5000, seed=flags.seed + hvd.rank())
        .repeat()
        .batch(flags.batch_size)
    )

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            loss = losses(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    steps = hvd.scale_steps(flags.steps)
    loss = tf.constant(0.0)
    for step, (images, labels) in enumerate(dataset.take(steps)):
        loss = train_step(images, labels)
        if step == 0:  # the first step creates the variables of the optimizer
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        if step % 20 == 0 and hvd.rank() == 0:
            print(f"step {step} of {steps}: loss {float(loss):.4g}", flush=True)

    images, labels = data["test"].values()
    right = tf.reduce_sum(tf.cast(tf.argmax(model(images), -1) == labels, tf.int64))
    mean_loss = float(hvd.allreduce(loss))
    folder = hvd.checkpoint_dir(flags.checkpoint_dir)
    if folder:
        tf.train.Checkpoint(model=model, optimizer=optimizer).save(f"{folder}/ckpt")
    if hvd.rank() == 0:
        percent = 100 * float(right) / len(labels)
        print(f"loss {mean_loss:.4g}, {percent:.1f} % of {len(labels)} test images", flush=True)


def _model():
    return keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10),
        ]
    )


def _flags():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=64, help="examples of one rank's step")
    parser.add_argument("--steps", type=int, default=200, help="steps of one process; dealt to all")
    parser.add_argument("--learning_rate", type=float, default=0.001, help="of one process")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    parser.add_argument("--checkpoint_dir", default="runs/horovod_mnist")
    parser.add_argument("--data", default="shipped", help=digits.HELP)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _one_gpu_each():
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")


if __name__ == "__main__":
    main()
