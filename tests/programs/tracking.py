"""A small training with two evaluation sets. FAIL_AT=20 raises an error, SIGTERM_AT=20 sends a signal."""

import os
import signal

import ctl
import keras
import numpy as np
import tensorflow as tf
from absl import flags
from ctl.trackers.mlflow_writer import MlflowWriter
from ctl.trackers.wandb_writer import WandbWriter

_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.01, "Step size.")


class Tracked(ctl.Trainer):
    """A regression."""

    def __init__(self, learning_rate, **options):
        super().__init__(**options)
        self.learning_rate = learning_rate

    def build(self):
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(self.learning_rate)

    def train_data(self, batch_size):
        x = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
        return ctl.from_arrays((x, x.sum(axis=1)), batch_size)

    def eval_data(self, batch_size):
        x = np.ones((16, 4), np.float32)
        data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1))).batch(batch_size)
        return {"clean": data, "noisy": data}

    def score(self, batch, training):
        outputs = tf.cast(self.model(batch[0], training=training), tf.float32)
        return {"loss": tf.square(outputs[:, 0] - batch[1])}

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        return self.score(batch, training=False)

    def after_loop(self, step, means):
        if step == int(os.environ.get("FAIL_AT", "-1")):
            raise ValueError("bad batch\nin line 2")
        if step == int(os.environ.get("SIGTERM_AT", "-1")):
            os.kill(os.getpid(), signal.SIGTERM)


def wait_for_trackers():
    """Lets the trackers take ten minutes, instead of 10 s after a signal: a busy machine is slow."""
    for writer in (MlflowWriter, WandbWriter):
        writer.__init__.__kwdefaults__["close_secs"] = 600.0


if __name__ == "__main__":
    if {"FAIL_AT", "SIGTERM_AT"} & os.environ.keys():
        wait_for_trackers()
    ctl.run(Tracked, learning_rate=_LEARNING_RATE)
