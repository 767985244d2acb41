"""MNIST with Keras 3's Model.fit, one process per rank, as scripts for Horovod are written.

ctlrun -np 2 python -m models.horovod.mnist_keras --epochs=3
"""

import argparse

import ctl.hvd.keras as hvd
import keras
import numpy as np

from models.data import digits


def main(argv=None):
    """Trains on all ranks."""
    flags = _flags().parse_args(argv)
    hvd.init()
    keras.utils.set_random_seed(flags.seed)
    data = digits.load(flags.data)
    images, labels = data["train"].values()
    test_images, test_labels = data["test"].values()
    rows = np.arange(hvd.rank(), len(images) - len(images) % hvd.size(), hvd.size())

    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    scaled = flags.learning_rate * hvd.size()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(scaled),
        backward_passes_per_step=flags.backward_passes_per_step,
        average_aggregated_gradients=True,
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=scaled, warmup_epochs=flags.warmup_epochs, verbose=int(hvd.rank() == 0)
        ),
    ]
    if hvd.rank() == 0 and flags.checkpoint:
        callbacks.append(keras.callbacks.ModelCheckpoint(flags.checkpoint))
    model.fit(
        images[rows],
        labels[rows],
        batch_size=flags.batch_size,
        epochs=flags.epochs,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    if hvd.rank() == 0:
        print(f"{100 * accuracy:.1f} % of {len(test_labels)} test images", flush=True)


def _flags():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=64, help="examples of one rank's step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--warmup_epochs", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=0.001, help="of one process")
    parser.add_argument("--backward_passes_per_step", type=int, default=1)
    parser.add_argument("--checkpoint", default="", help="a .keras file, written by rank 0")
    parser.add_argument("--data", default="shipped", help=digits.HELP)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
