"""Workers with local steps: their examples and final weights, as one line of JSON."""

import contextlib
import json
import os
import signal
import sys

import ctl
import keras
import numpy as np
import tensorflow as tf
from ctl.distribute.engine_all_reduce import engine_of

FEATURES, BATCH, EVERY = 4, 6, 4
MOMENTUM, RATE, OUTER = 0.8, 0.05, {"outer_learning_rate": 0.7, "outer_momentum": 0.9}


class Line(ctl.Trainer):
    """Least squares that records the examples of this worker. May produce NaN or send a signal."""

    def __init__(self, adam=False, broken=(), signal_at=0, **options):
        self.adam, self.broken, self.signal_at, self.seen = adam, broken, signal_at, []
        options = {"global_batch_size": BATCH, "sync_every": EVERY, "writers": [], **options}
        super().__init__(**{"log_every_steps": 5, "steps_per_loop": 3, **options})

    def build(self):
        self.model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, use_bias=False)])
        self.model.set_weights([np.linspace(-1, 1, FEATURES, dtype=np.float32)[:, None]])
        optimizer = keras.optimizers.Adam(0.02) if self.adam else keras.optimizers.SGD(RATE, MOMENTUM)
        self.optimizer = optimizer

    def train_data(self, batch_size):
        return ctl.example_numbers(batch_size)

    def note(self, numbers):
        self.seen.append(numbers.numpy().tolist())
        if len(self.seen) == self.signal_at and self.topology.is_chief:
            os.kill(os.getpid(), signal.SIGTERM)

    def train_step(self, numbers):
        tf.py_function(self.note, [numbers], [])
        x, y = features(tf.cast(numbers, tf.float32))
        for number in self.broken:
            y = tf.where(numbers == number, float("nan"), y)
        with tf.GradientTape() as tape:
            error = (self.model(x)[:, 0] - y) ** 2
            loss = self.average(error)
        self.minimize(loss, tape)
        return {"loss": error}


def features(n):
    return tf.sin(n[:, None] * tf.range(1.0, FEATURES + 1)), tf.cos(n)


def weights(trainer):
    return trainer.model.get_weights()[0][:, 0].astype(float).tolist()


def trained(strategy, steps, **options):
    trainer = Line(strategy=strategy, **options)
    trainer.train(steps)
    return {"seen": trainer.seen, "weights": weights(trainer), "bits": bits(trainer)}


def bits(trainer):
    """Returns the weights and the optimizer state of this worker."""
    values = [np.asarray(v.value).ravel() for v in (*trainer.model.weights, *trainer.optimizer.variables)]
    return np.concatenate([v.astype(np.float64) for v in values]).tobytes().hex()


def resumed(strategy, **options):
    """Runs the same training uninterrupted, stopped at a save, and stopped by a signal in a known step."""
    uninterrupted = trained(strategy, 16, adam=True, model_dir=directory("whole"), **options)["bits"]
    model_dir = directory("pieces")
    trained(strategy, 6, adam=True, model_dir=model_dir, **options)
    pieces = trained(strategy, 16, adam=True, model_dir=model_dir, **options)["bits"]
    model_dir = directory("signalled")
    trainer = Line(strategy=strategy, adam=True, model_dir=model_dir, signal_at=8, **options)
    with contextlib.suppress(ctl.Stopped):
        trainer.train(16)
    signalled = trained(strategy, 16, adam=True, model_dir=model_dir, **options)["bits"]
    return {"whole": uninterrupted, "pieces": pieces, "signalled": signalled, "step": trainer.step}


def directory(name):
    return f"{sys.argv[1]}/{name}{next(_numbers)}"


_numbers = iter(range(100))


def broken(strategy, policy):
    """Trains with NaN in the examples of one worker."""
    trainer = Line(strategy=strategy, broken=[7], on_nonfinite=policy)
    try:
        trainer.train(8)
    except ctl.NonFiniteError as e:
        return {"error": str(e), "weights": []}
    return {"error": "", "weights": weights(trainer)}


def bytes_sent(strategy, every):
    """Returns the bytes that this worker sends in 32 steps."""
    before = engine_of(strategy).bytes_sent
    trained(strategy, 32, sync_every=every, steps_per_loop=32, log_every_steps=0)
    return engine_of(strategy).bytes_sent - before


def main():
    strategy = ctl.make_strategy("multi_worker", communication=sys.argv[2])
    results = {
        "averaged": trained(strategy, 10),
        "outer": trained(strategy, 10, **OUTER),
        "resumed": resumed(strategy, save_every_steps=6, **OUTER),
        "stop": broken(strategy, "stop"),
        "skip": broken(strategy, "skip"),
        "bytes": {every: bytes_sent(strategy, every) for every in (1, 16)},
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
