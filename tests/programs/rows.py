"""Trainers of tables with row gradients, and optimizers that process them differently."""

import ctl
import keras
import numpy as np
import tensorflow as tf

BATCH, LENGTH = 8, 6


class Lazy(keras.optimizers.Optimizer):
    """Momentum only for rows with a gradient. Dense or duplicated gradients train a different model."""

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
    """Sentences of 0 to 6 words in two tables. The number of rows differs by step and replica.

    17 sentences in batches of 8. The last batch has one sentence, so one of two replicas has none.
    """

    optimizer_of = staticmethod(lambda: keras.optimizers.SGD(0.5))
    num_words, gradient_options = 3000, {}

    def build(self):
        self.model = tf.Module()
        start = np.random.default_rng(4).normal(size=[self.num_words, 4])
        self.model.left = tf.Variable(start, dtype="float32")
        self.model.right = tf.Variable(start[::-1], dtype="float32")
        self.model.get_weights = lambda: [v.numpy() for v in self.model.trainable_variables]
        self.optimizer = self.optimizer_of()
        self.optimizer.build(self.model.trainable_variables)
        self.gradients = ctl.Gradients(**self.gradient_options)

    def ids(self):
        generator = np.random.default_rng(5)
        ids = generator.integers(1, 40, (17, LENGTH)) * (self.num_words // 40)
        ids[np.arange(LENGTH) >= generator.integers(0, LENGTH + 1, (17, 1))] = 0
        return ids

    def train_data(self, batch_size):
        return tf.data.Dataset.from_tensor_slices(self.ids()).batch(batch_size).repeat()

    def loss_of(self, ids):
        word_positions = tf.where(ids > 0)
        word_ids = tf.gather_nd(ids, word_positions)
        rows = tf.gather(self.model.left, word_ids) * tf.gather(self.model.right, word_ids - 1)
        return tf.math.unsorted_segment_sum(
            tf.reduce_sum(rows, axis=1) ** 2, word_positions[:, 0], tf.shape(ids)[0]
        )

    def train_step(self, ids):
        with tf.GradientTape() as tape:
            loss = self.loss_of(ids)
            mean = self.average(loss)
        self.minimize(mean, tape, self.model.trainable_variables)
        return {"loss": loss}


def rows_with(optimizer, **changes):
    return type("Rows", (Rows,), {"optimizer_of": staticmethod(optimizer), **changes})


LARGE = 20_000  # rows of a table that is always larger than its row gradients
ROWS = {
    "rows_sgd": Rows,
    "rows_adam": rows_with(lambda: keras.optimizers.Adam(0.1)),
    "rows_lazy": rows_with(lambda: Lazy(0.05), num_words=LARGE),
    "rows_lazy_small_table": rows_with(lambda: Lazy(0.05), num_words=40),
    "rows_adagrad": rows_with(lambda: keras.optimizers.Adagrad(0.5)),
    "rows_lazy_accumulated": rows_with(lambda: Lazy(0.05), gradient_options={"accumulate_steps": 3}),
    "rows_lazy_clipped": rows_with(lambda: Lazy(0.05), gradient_options={"clip_norm": 0.5}),
}
