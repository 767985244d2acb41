"""Short trainings. A refactoring must not change a bit of their losses and weights.

    python tests/golden/cases.py mnist_two_replicas
    ctl launch --workers=2 -- python tests/golden/cases.py mnist_workers

Prints one JSON line on the chief: the loss of each step as a hexadecimal number, a SHA-256 of the weights.
"""

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable

import ctl
import keras
import numpy as np
import tensorflow as tf

from models.mnist import Mnist

STEPS = 30


class Accumulated(Mnist):
    def build(self):
        super().build()
        self.gradients = ctl.Gradients(accumulate_steps=3, clip_norm=1.0)


class Scaled(Mnist):
    """The loss is scaled; the scale is halved at steps with an infinite gradient, and grows."""

    def build(self):
        super().build()
        self.optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(1e-3), initial_scale=2.0**127, dynamic_growth_steps=4
        )


class Int8(Mnist):
    def build(self):
        super().build()
        self.gradients = ctl.Gradients(wire_dtype="int8")


class Words(ctl.Trainer):
    """An embedding with sparse gradients, and a mask of words in batches `[b, 6]` of int64."""

    def build(self):
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential([
            keras.Input((6,)), keras.layers.Embedding(5000, 4), keras.layers.Dense(8),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(0.01)

    def train_data(self, batch_size):
        token_ids = np.random.default_rng(3).integers(0, 5000, (200, 6))
        token_ids[np.arange(6) >= np.arange(200)[:, None] % 6 + 1] = 0
        return ctl.from_arrays((token_ids, token_ids % 8), batch_size)

    def train_step(self, batch):
        token_ids, tags = batch
        mask = token_ids > 0
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tags, self.model(token_ids))
            loss = self.average(losses, mask=mask)
        self.minimize(loss, tape)
        return {"loss": (tf.where(mask, losses, 0.0), mask)}


def train(
    make: Callable[..., ctl.Trainer], replicas: int = 1, model_dir: str | None = None, **options
) -> dict:
    """Trains to step STEPS under the strategy of the job, or over `replicas` virtual devices."""
    if replicas > 1:
        options["strategy"] = ctl.make_strategy("mirrored", devices=[f"cpu:{i}" for i in range(replicas)])
    writer = ctl.MemoryWriter()
    every_step = ctl.Intervals(log=ctl.Every(steps=1), save=ctl.Every(steps=10))
    trainer = make(
        global_batch_size=24, writers=[writer], intervals=every_step, model_dir=model_dir, seed=1, **options
    )
    trainer.train(STEPS)
    losses = [float(row["loss"]).hex() for run, _, row in writer.rows if run == "train"]
    return {"losses": losses, "weights": digest(trainer.model.get_weights())}


def digest(weights: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(w).tobytes() for w in weights)).hexdigest()


def fit() -> dict:
    """Returns the result of ctl.fit with a compiled model after three epochs on two replicas."""
    keras.utils.set_random_seed(2)
    x = np.random.default_rng(0).normal(size=(100, 6)).astype(np.float32)
    with ctl.make_strategy("mirrored", devices=["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = ctl.fit(model, x, x[:, :1], batch_size=16, epochs=3, verbose=0, validation_split=0.2).history
    losses = [float(v).hex() for name in sorted(history) for v in history[name]]
    return {"losses": losses, "weights": digest(model.get_weights())}


CASES: dict[str, Callable[..., dict]] = {
    "mnist": functools.partial(train, Mnist, strategy="one_device"),
    "mnist_two_replicas": functools.partial(train, Mnist, 2),
    "accumulated": functools.partial(train, Accumulated, strategy="one_device"),
    "accumulated_two_replicas": functools.partial(train, Accumulated, 2),
    "scaled_two_replicas": functools.partial(train, Scaled, 2),
    "words": functools.partial(train, Words, strategy="one_device"),
    "words_two_replicas": functools.partial(train, Words, 2),
    "fit": fit,
    "mnist_workers": functools.partial(train, Mnist),
    "words_workers": functools.partial(train, Words),
    "local_steps_workers": functools.partial(train, Mnist, sync_every=4),
    "outer_steps_workers": functools.partial(
        train, Mnist, sync_every=4, outer_learning_rate=0.7, outer_momentum=0.5
    ),
    "int8_workers": functools.partial(train, Int8),
    "compiled": functools.partial(train, Accumulated, strategy="one_device", jit_compile="loop"),
    "compiled_step_two_replicas": functools.partial(train, Mnist, 2, jit_compile="step"),
    "parameter_server": functools.partial(train, Mnist, strategy="parameter_server"),
}


def main() -> None:
    name, *model_dir = sys.argv[1:]
    if "TF_CONFIG" not in os.environ:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
    print(json.dumps(CASES[name](**({"model_dir": model_dir[0]} if model_dir else {}))), flush=True)


if __name__ == "__main__":
    main()
