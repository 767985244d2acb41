"""Trainers with one mistake each, as a program with flags (NAME --train_steps=2) or a script (NAME)."""

import sys

import ctl
import keras
import numpy as np
import tensorflow as tf

X, Y = np.ones([64, 4], np.float32), np.zeros([64], np.int64)


class Classifier(ctl.Trainer):
    arrays = (X, Y)

    def build(self):
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        return ctl.from_arrays(self.arrays, batch_size)

    def losses(self, batch):
        logits = self.model(batch[0], training=True)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            losses = self.losses(batch)
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}


def keras_losses(self, batch):
    return keras.losses.sparse_categorical_crossentropy(batch[1], self.model(batch[0]), from_logits=True)


def raises(self, batch):
    raise RuntimeError("an error of the user")


def in_a_condition(self, batch):
    with tf.GradientTape() as tape:
        losses = self.losses(batch)
        loss = self.average(losses)
    if self.step_variable % 2 == 0:
        self.minimize(loss, tape)
    return {"loss": losses}


def logs_in_a_condition(self, batch):
    if self.step_variable % 2 == 0:
        self.log("even", 1.0)
    return Classifier.train_step(self, batch)


def average_of_a_mean(self, batch):
    with tf.GradientTape() as tape:
        loss = self.average(tf.reduce_mean(self.losses(batch)))
    self.minimize(loss, tape)
    return {"loss": loss}


def frozen(self):
    Classifier.build(self)
    self.model.trainable = False


def without_model(self):
    self.optimizer = keras.optimizers.SGD(0.1)


def without_input(self):
    self.model = keras.Sequential([keras.layers.Dropout(0.1), keras.layers.Dense(2, name="late")])
    self.optimizer = keras.optimizers.SGD(0.1)


class NewHead(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        self.head = keras.layers.Dense(2, name="late")

    def call(self, x):
        return self.head(self.body(x))


def with_new_head(self):
    self.model, self.optimizer = NewHead(), keras.optimizers.SGD(0.1)


def rows():
    return tf.data.Dataset.from_tensor_slices((X, Y)).repeat()


def with_none(self, batch_size):
    return rows().map(lambda x, y: (x, y, None)).batch(batch_size)


def of_unknown_rank(self, batch_size):
    return rows().batch(batch_size).map(lambda x, y: (tf.py_function(tf.identity, [x], tf.float32), y))


ONE_HOT, TEXTS = np.eye(2, dtype=np.float32)[Y], np.array(["a"] * 64)
MISTAKES = {
    "width": {"arrays": (np.ones([64, 5], np.float32), Y)},
    "one-hot": {"arrays": (X, ONE_HOT)},
    "one-hot in Keras": {"arrays": (X, ONE_HOT), "losses": keras_losses},
    "labels [b, 1]": {"arrays": (X, Y[:, None])},
    "texts": {"arrays": (X, TEXTS)},
    "texts in Keras": {"arrays": (X, TEXTS), "losses": keras_losses},
    "range": {"arrays": (X, Y + 7)},
    "range in Keras": {"arrays": (X, Y + 7), "losses": keras_losses},
    "dictionary": {"arrays": {"image": X, "label": Y}},
    "no model": {"build": without_model},
    "raises": {"train_step": raises},
    "condition": {"train_step": in_a_condition},
    "log in a condition": {"train_step": logs_in_a_condition},
    "mean": {"train_step": average_of_a_mean},
    "frozen": {"build": frozen},
    "no input shape": {"build": without_input},
    "new head": {"build": with_new_head},
    "None": {"train_data": with_none},
    "unknown rank": {"train_data": of_unknown_rank},
}


def trainer_class(name):
    return type("Mistaken", (Classifier,), MISTAKES[name])


if __name__ == "__main__":
    name = sys.argv.pop(1)
    if sys.argv[1:]:
        ctl.run(trainer_class(name))
    else:
        trainer_class(name)(global_batch_size=16, writers=[]).train(2)
