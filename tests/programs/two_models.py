"""A trainer with two models and no self.model, as in a GAN; a program when it is run."""

import ctl
import keras
import numpy as np
import tensorflow as tf


class Pair(ctl.Trainer):
    def build(self):
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.critic = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        return ctl.from_arrays(np.ones([16, 4], np.float32), batch_size)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            losses = self.critic(self.generator(batch))[:, 0]
            loss = self.average(losses)
        self.minimize(loss, tape, self.generator.trainable_variables)
        return {"loss": losses}


if __name__ == "__main__":
    ctl.run(Pair)
