"""Sparse gradients of embeddings: results equal those of dense gradients on any number of replicas."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
import unequal_shares
from conftest import some_of
from small_models import Small, weights
from test_gradients import NO_SAVE, assert_equal, trained, with_gradients


class Words(ctl.Trainer):
    """An embedding with a sparse gradient; every token occurs several times."""

    def build(self):
        start = np.random.default_rng(0).normal(size=[10, 3]).astype(np.float32)
        self.model = tf.Module()
        self.model.table = tf.Variable(start)
        self.optimizer = keras.optimizers.SGD(1.0)
        self.optimizer.build([self.model.table])

    def train_data(self, batch_size):
        ids = np.random.default_rng(1).integers(0, 4, [64, 5])
        return ctl.from_arrays(ids, batch_size)

    def train_step(self, ids):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self.model.table, ids)
            scores = {"loss": tf.reduce_sum(tf.reduce_sum(rows, 1) ** 2, axis=1)}
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores


def test_the_sparse_gradient_of_an_embedding_is_that_of_one_device(two_replicas):
    changed = with_gradients(Words, clip_norm=0.5)
    expected = trained(changed(strategy="default", global_batch_size=8))
    assert_equal(expected, trained(changed(strategy=two_replicas, global_batch_size=8)), atol=1e-5)


def test_the_norm_of_a_sparse_gradient_is_that_of_the_dense_one():
    sparse = Words(strategy="default", global_batch_size=8, **NO_SAVE)
    dense = with_gradients(Words, accumulate_steps=2)(strategy="default", global_batch_size=8, **NO_SAVE)
    assert sparse.train(1)["gradient_norm"] == pytest.approx(dense.train(1)["gradient_norm"], rel=1e-4)


@pytest.mark.parametrize("fixed", some_of([True, False], False))
def test_sparse_gradients_are_summed_in_long_loops_too(two_replicas, fixed):
    token_ids = np.random.default_rng(0).integers(0, 50, (42, 6))
    token_ids[:20] %= 5  # frequent rows: the number of distinct rows differs between batches

    class Words(Small):
        def build(self):
            keras.utils.set_random_seed(3)
            self.model = keras.Sequential([
                keras.Input((6,)), keras.layers.Embedding(50, 4), keras.layers.Flatten(),
                keras.layers.Dense(4),
            ])  # fmt: skip
            self.optimizer = keras.optimizers.SGD(0.5)

        def train_data(self, batch_size):
            arrays = token_ids, token_ids[:, 0] % 4
            if fixed:
                return ctl.from_arrays(arrays, batch_size)
            return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size).repeat()

    results = []
    for strategy in ("default", two_replicas):
        trainer = Words(strategy=strategy, global_batch_size=8, writers=[],
                        intervals=ctl.Intervals(steps_per_loop=12, save=ctl.Every()))  # fmt: skip
        trainer.train(24)
        results.append(weights(trainer))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_variables_of_two_precisions_are_updated_and_clipped_together():
    class Mixed(Words):
        def build(self):
            super().build()
            self.model.scale = tf.Variable(1.0, dtype=tf.float64)
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build([self.model.table, self.model.scale])
            self.gradients = ctl.Gradients(clip_norm=0.5)

        def train_step(self, ids):
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(self.model.table, ids)
                scores = tf.reduce_sum(rows, [1, 2]) * tf.cast(self.model.scale, tf.float32)
                loss = self.average(scores)
            self.minimize(loss, tape)
            return {"loss": scores}

    Mixed(strategy="default", global_batch_size=8, **NO_SAVE).train(1)


@pytest.mark.parametrize("in_memory", some_of([True, False], True))
def test_a_run_resumed_on_replicas_with_unequal_shares_equals_one_device(
    two_replicas, in_memory, tmp_path
):
    expected = unequal_shares.outcome("default", 6, in_memory)
    unequal_shares.outcome("default", 3, in_memory, str(tmp_path))
    resumed = unequal_shares.outcome(two_replicas, 6, in_memory, str(tmp_path))
    np.testing.assert_allclose(resumed["losses"], expected["losses"][3:], atol=1e-4)
    np.testing.assert_allclose(resumed["weights"], expected["weights"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [tf.float16, tf.float64])
def test_rows_travel_in_the_dtype_of_their_table(two_replicas, dtype):
    """The row numbers exceed 2^20, which float16 cannot represent."""

    class ManyRows(Words):
        def build(self):
            self.model = tf.Module()
            self.model.table = tf.Variable(tf.zeros([(1 << 20) + 50, 2], dtype))
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build([self.model.table])

        def train_step(self, ids):
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(self.model.table, ids + (1 << 20))
                scores = tf.reduce_sum(rows * tf.cast([1, 3], dtype), axis=[1, 2])
                loss = self.average(scores)
            self.minimize(loss, tape)
            return {"loss": scores}

    ids = np.random.default_rng(1).integers(0, 4, [64, 5])[:8]
    token_counts = np.bincount(ids.ravel(), minlength=4)
    for strategy in ("default", two_replicas):
        trainer = ManyRows(strategy=strategy, global_batch_size=8, **NO_SAVE)
        trainer.train_data = lambda batch_size: tf.data.Dataset.from_tensor_slices(ids).batch(8)
        trainer.train(1)
        table = trainer.model.table.numpy()
        np.testing.assert_allclose(table[1 << 20 :][:4], -token_counts[:, None] / 8 * [1, 3], atol=1e-2)
        assert not table[: 1 << 20].any()


@pytest.mark.parametrize("where", some_of(["default", "two"], "two"))
def test_a_compiled_step_has_sparse_gradients_too(two_replicas, where):
    gradient_types = []

    class Recording(keras.optimizers.SGD):
        def apply(self, gradients, variables=None):
            gradient_types.extend(type(g) for g in gradients)
            return super().apply(gradients, variables)

    class Lazy(Words):
        def build(self):
            super().build()
            self.optimizer = Recording(0.01)
            self.optimizer.build([self.model.table])

    strategy = two_replicas if where == "two" else "default"
    uncompiled = trained(Lazy(strategy=strategy, global_batch_size=8))
    compiled = trained(Lazy(strategy=strategy, global_batch_size=8, jit_compile=True))
    assert set(gradient_types) == {tf.IndexedSlices}
    assert_equal(uncompiled, compiled, atol=1e-5)


@pytest.mark.slow
def test_fit_with_an_embedding_and_short_batches_is_that_of_keras(two_replicas):
    token_ids = np.random.default_rng(0).integers(0, 50, (44, 6))
    token_ids[:20] %= 5
    tags = token_ids[:, 0] % 4

    def make_model():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([
            keras.Input((6,)), keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(4),
        ])  # fmt: skip
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss)
        return model

    expected = make_model().fit(token_ids, tags, batch_size=8, epochs=4, shuffle=False, verbose=0)
    with two_replicas.scope():
        model = make_model()
    data = tf.data.Dataset.from_tensor_slices((token_ids, tags)).batch(8)
    history = ctl.fit(model, data, epochs=4, verbose=0)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], atol=1e-5)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
}
# (optimizer, whether batch sizes are static or rows are merged)
CASES = [(name, value) for name in OPTIMIZERS for value in (True, False)]
# 256 rows per batch for a table of 3 rows: a dense gradient would be much smaller to send
LABELS = np.random.default_rng(0).integers(0, 3, (1000, 1))
TARGETS = np.float32(LABELS + np.random.default_rng(1).normal(size=(1000, 4)))


def small_table(optimizer):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((1,)), keras.layers.Embedding(3, 4), keras.layers.Flatten()]
    model = keras.Sequential(layers)
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


@pytest.mark.parametrize("case", some_of(CASES, ("adam", False)), ids=str)
def test_fit_updates_a_small_table_as_keras_does(two_replicas, case):
    optimizer, is_static = case
    count = 768 if is_static else 1000
    arrays = LABELS[:count], TARGETS[:count]
    fit_options = {"epochs": 5, "shuffle": False, "verbose": 0}
    expected = small_table(optimizer).fit(*arrays, batch_size=256, **fit_options)
    with two_replicas.scope():
        model = small_table(optimizer)
    if is_static:
        history = ctl.fit(model, *arrays, batch_size=256, **fit_options)
    else:
        history = ctl.fit(model, tf.data.Dataset.from_tensor_slices(arrays).batch(256), epochs=5, verbose=0)
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)


@pytest.mark.parametrize("is_static", some_of([True, False], False))
@pytest.mark.parametrize("case", some_of(CASES, ("adam", True)), ids=str)
def test_every_way_of_sending_rows_gives_the_update_of_one_device(two_replicas, case, is_static):
    """One table has fewer rows than the gradient, one has more; batches have static and dynamic sizes."""
    optimizer, merge_rows = case

    class Tables(ctl.Trainer):
        def build(self):
            start = np.random.default_rng(0).normal(size=[3000, 2]).astype(np.float32)
            self.model = tf.Module()
            self.model.tables = [tf.Variable(start[:3]), tf.Variable(start)]
            self.optimizer = OPTIMIZERS[optimizer]()
            self.optimizer.build(self.model.tables)
            self.gradients = ctl.Gradients(merge_rows=merge_rows)

        def train_data(self, batch_size):
            token_ids = np.random.default_rng(1).integers(0, 3, [8 * batch_size - 10, 4])
            if is_static:
                return ctl.from_arrays(token_ids[: 7 * batch_size], batch_size, shuffle=False)
            return tf.data.Dataset.from_tensor_slices(token_ids).batch(batch_size)

        def train_step(self, token_ids):
            with tf.GradientTape() as tape:
                rows = [
                    tf.nn.embedding_lookup(t, token_ids * f)
                    for t, f in zip(self.model.tables, (1, 900), strict=True)
                ]
                scores = {"loss": tf.add_n([tf.reduce_sum((r - 1.0) ** 2, axis=[1, 2]) for r in rows])}
                loss = self.average(scores["loss"])
            self.minimize(loss, tape)
            return scores

    results = []
    for strategy in ("default", two_replicas):
        trainer = Tables(strategy=strategy, global_batch_size=64, **NO_SAVE)
        trainer.train(7)
        results.append([t.numpy() for t in trainer.model.tables])
    assert_equal(*results, atol=2e-6)
