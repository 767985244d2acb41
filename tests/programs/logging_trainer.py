"""A run that logs while its console is live: warnings of the user and of absl, and an early stop."""

import logging
import time

import ctl
import keras
import numpy as np
import tensorflow as tf
from absl import logging as absl_logging


class Logging(ctl.Trainer):
    def build(self):
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.0)
        self.callbacks.append(ctl.EarlyStopping("loss", patience=3, restore_best=True))

    def train_data(self, batch_size):
        return ctl.from_arrays(np.ones([64, 4], np.float32), batch_size)

    eval_data = train_data

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            losses = (self.model(batch)[:, 0] - 1.0) ** 2
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}

    def eval_step(self, batch):
        return {"loss": (self.model(batch)[:, 0] - 1.0) ** 2}

    def after_loop(self, step, means):
        time.sleep(0.02)  # so that the bar is drawn between the lines
        if step % 10 == 0:
            logging.getLogger("ctl").warning("a warning of ctl at step %d", step)
        if step % 10 == 5:
            absl_logging.warning("a warning of absl at step %d", step)
            print(f"printed at step {step}", flush=True)


if __name__ == "__main__":
    ctl.run(Logging)
