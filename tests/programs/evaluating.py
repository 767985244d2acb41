"""An evaluation that is long (EVAL=long) or fails on one worker (EVAL=bad:1). UNKNOWN=1 hides its length.

EVAL=held:PATH is long, and its first batch waits for the file PATH.
"""

import os
import time

import ctl
import keras
import numpy as np
import tensorflow as tf

EVAL_MODE, _, EVAL_ARGUMENT = os.environ.get("EVAL", "").partition(":")
BATCHES = 600


class Job(ctl.Trainer):
    """A regression. The evaluation sleeps 0.1 s per batch, or has one invalid record."""

    def build(self):
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.Adam(0.01)

    def train_data(self, batch_size):
        x = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
        return ctl.from_arrays((x, x.sum(axis=1)), batch_size)

    def eval_data(self, batch_size):
        data = tf.data.Dataset.range(BATCHES if EVAL_MODE in ("long", "held") else 8)
        if os.environ.get("UNKNOWN"):
            data = data.filter(lambda i: i >= 0)

        def row(i):
            def wait(i):
                if EVAL_MODE in ("long", "held"):
                    print("evaluating", flush=True)
                    time.sleep(0.1)
                while EVAL_MODE == "held" and not os.path.exists(EVAL_ARGUMENT):
                    time.sleep(0.02)
                if EVAL_MODE == "bad" and i == 5 and int(EVAL_ARGUMENT) == self.topology.worker_index:
                    raise ValueError("a bad record")
                return np.float32(i)

            value = tf.ensure_shape(tf.numpy_function(wait, [i], tf.float32), [])
            return tf.fill([2, 4], value), tf.fill([2], value)

        return data.map(row)

    def score(self, batch, training):
        x, y = batch
        return {"loss": tf.square(self.model(x, training=training)[:, 0] - y)}

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        return self.score(batch, training=False)


if __name__ == "__main__":
    ctl.run(Job)
