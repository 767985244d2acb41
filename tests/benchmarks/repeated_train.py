"""Time of a further call of `train` for one step: with kept and with discarded kernels.

    python tests/benchmarks/repeated_train.py --layers=2,30 --rounds=3

In each round several calls of one mode follow those of the other one, in one process. The first call of a
mode is excluded, because it compiles. Prints medians (ms), and their ratio.
"""

import itertools
import os
import statistics
import time

import ctl
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from ctl.tensorflow_patches import switches

_LAYERS = flags.DEFINE_list("layers", ["2", "30"], "Numbers of layers of the networks.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Number of rounds.")
_CALLS = 5  # of one mode in a round, besides the first
_MODES = {"kept": "", "discarded": "kernel_seeds"}  # value of the variable that turns off patches


class Dense(ctl.Trainer):
    """A network of dense layers."""

    def __init__(self, layers, **options):
        super().__init__(**options)
        self.layers = layers

    def build(self):
        layers = [keras.layers.Dense(32, activation="tanh") for _ in range(self.layers)]
        self.model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.Adam(1e-3)

    def train_data(self, batch_size):
        return ctl.from_arrays({"x": np.ones([64, 8], np.float32)}, batch_size)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.average(tf.square(self.model(batch["x"], training=True))[:, 0])
        self.minimize(loss, tape)
        return {"loss": loss}


def measure(num_layers: int, rounds: int) -> dict[str, float]:
    """Returns the median time of a call by mode (seconds)."""
    options = {"global_batch_size": 16, "writers": ()}
    trainer, steps = Dense(num_layers, **options), itertools.count(1)
    secs = {mode: [] for mode in _MODES}
    for _round in range(rounds):
        for mode, disabled in _MODES.items():
            os.environ[switches.VARIABLE] = disabled
            trainer.train(steps=next(steps))
            for _call in range(_CALLS):
                start = time.perf_counter()
                trainer.train(steps=next(steps))
                secs[mode].append(time.perf_counter() - start)
    return {mode: statistics.median(values) for mode, values in secs.items()}


def main(_: list[str]) -> None:
    print(f"{'layers':>6} {'kept':>8} {'discarded':>10} {'ratio':>6}")
    for num_layers in map(int, _LAYERS.value):
        kept_ms, discarded_ms = (1e3 * value for value in measure(num_layers, _ROUNDS.value).values())
        ratio = kept_ms / discarded_ms
        print(f"{num_layers:6} {kept_ms:8.1f} {discarded_ms:10.1f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    app.run(main)
