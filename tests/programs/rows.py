"""Trainers of tables, whose gradients are rows: optimizers that see them in different ways."""

import ctl
import keras
import numpy as np
import tensorflow as tf

BATCH, LENGTH = 8, 6


class Lazy(keras.optimizers.Optimizer):
    """Momentum that only rows with a gradient have; what is dense or doubled trains another model."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.momenta = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momenta[self._get_variable_index(variable)].value
        rows = 0.9 * tf.gather(momentum, gradient.indices) + gradient.values
        momentum.scatter_update(tf.IndexedSlices(rows, gradient.indices))
        step = tf.cast(learning_rate, rows.dtype) * rows
        variable.scatter_sub(tf.IndexedSlices(step, gradient.indices))


class Rows(ctl.Trainer):
    """Sentences of 0 to 6 words in two tables; the number of rows differs by step and replica.

    17 sentences in batches of 8: the last has one, and one replica of two none.
    """

    optimizer_of = staticmethod(lambda: keras.optimizers.SGD(0.5))
    words, how = 3000, {}

    def build(self):
        self.model = tf.Module()
        start = np.random.default_rng(4).normal(size=[self.words, 4])
        self.model.left = tf.Variable(start, dtype="float32")
        self.model.right = tf.Variable(start[::-1], dtype="float32")
        self.model.get_weights = lambda: [v.numpy() for v in self.model.trainable_variables]
        self.optimizer = self.optimizer_of()
        self.optimizer.build(self.model.trainable_variables)
        self.gradients = ctl.Gradients(**self.how)

    def ids(self):
        generator = np.random.default_rng(5)
        ids = generator.integers(1, 40, (17, LENGTH)) * (self.words // 40)
        ids[np.arange(LENGTH) >= generator.integers(0, LENGTH + 1, (17, 1))] = 0
        return ids

    def train_data(self, batch_size):
        return tf.data.Dataset.from_tensor_slices(self.ids()).batch(batch_size).repeat()

    def loss_of(self, ids):
        found = tf.where(ids > 0)
        words = tf.gather_nd(ids, found)
        rows = tf.gather(self.model.left, words) * tf.gather(self.model.right, words - 1)
        return tf.math.unsorted_segment_sum(tf.reduce_sum(rows, axis=1) ** 2, found[:, 0], tf.shape(ids)[0])

    def train_step(self, ids):
        with tf.GradientTape() as tape:
            loss = self.loss_of(ids)
            mean = self.average(loss)
        self.minimize(mean, tape, self.model.trainable_variables)
        return {"loss": loss}


def rows_with(optimizer, **changes):
    return type("Rows", (Rows,), {"optimizer_of": staticmethod(optimizer), **changes})


LARGE = 20_000  # rows of a table that is never worth sending whole
ROWS = {
    "rows_sgd": Rows,
    "rows_adam": rows_with(lambda: keras.optimizers.Adam(0.1)),
    "rows_lazy": rows_with(lambda: Lazy(0.05), words=LARGE),
    "rows_lazy_small_table": rows_with(lambda: Lazy(0.05), words=40),
    "rows_adagrad": rows_with(lambda: keras.optimizers.Adagrad(0.5)),
    "rows_lazy_accumulated": rows_with(lambda: Lazy(0.05), how={"accumulate_steps": 3}),
    "rows_lazy_clipped": rows_with(lambda: Lazy(0.05), how={"clip_norm": 0.5}),
}
