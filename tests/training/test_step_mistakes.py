"""Beginners' mistakes in Python: each is one sentence with the cure, before any step."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.training import graph_loop
from small_models import Small, every_step, examples


def reads(self, batch):
    print(batch[0].numpy())


def reads_with_numpy(self, batch):
    np.mean(batch[0])


def makes_a_variable(self, batch):
    tf.Variable(1.0)


def makes_a_layer(self, batch):
    keras.layers.Dense(4)(batch[0])


def makes_an_optimizer(self, batch):
    self.optimizer = keras.optimizers.Adam()


def mixes_floats(self, batch):
    return tf.cast(batch[1], tf.float64) - batch[0][:, 0]


def takes_apart(self, batch):
    first, second = batch[0]
    return first, second


NO_VALUES = r"tensors have no values yet.*tf\.print.*self\.log.*"
CASES = [
    (reads, NO_VALUES + "batch\\[0\\].numpy"), (reads_with_numpy, NO_VALUES + "np.mean"),
    (makes_a_variable, "makes variables.*build.*Variable"),
    (makes_a_layer, r"makes variables.*build.*(Dense\(4\)|dense\w*/kernel)"),
    (makes_an_optimizer, "makes variables.*build"),
    (mixes_floats, r"astype\('float32'\).*float32 \(\d+, 8\), int64 \(\d+,\).*batch\[1\]"),
    (takes_apart, r"takes a tensor apart.*float32 \(\d+, 8\), int64"),
]  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0].__name__)
def test_a_step_that_cannot_be_traced_says_what_to_write(case, replicas, two_replicas):
    mistake, words = case

    class Wrong(Small):
        def train_step(self, batch):
            mistake(self, batch)
            return super().train_step(batch)

    trainer = Wrong(strategy=two_replicas if replicas == 2 else "default", writers=[])
    with pytest.raises(ctl.UsageError, match=f"(?s){words}") as found:
        trainer.train(1)
    assert trainer.step == 0 and found.value.exit_code == 2
    assert "site-packages" not in str(found.value) and "replica_step.py" not in str(found.value)


def test_the_same_in_an_eval_step():
    class Wrong(Small):
        def eval_step(self, batch):
            return {"loss": batch[0].numpy()}

    with pytest.raises(ctl.UsageError, match="tensors have no values yet"):
        Wrong(strategy="default", writers=[]).evaluate()


@pytest.mark.parametrize("call", ["train", "evaluate", "prepare", "predict", "export", "save"])
def test_a_forgotten_init_is_named(call):
    class Forgetful(ctl.Trainer):
        def __init__(self, units):
            self.units = units

    arguments = {"train": (1,), "predict": ([1.0],)}.get(call, ())
    with pytest.raises(ctl.UsageError, match=r"Forgetful.__init__ has not called super\(\).__init__"):
        getattr(Forgetful(3), call)(*arguments)


@pytest.mark.parametrize("shapes, words", [
    ([(4,), (4,)], r"not batched.*float32 \(4,\), float32 \(4,\)"),
    ([(32, 32, 3), (10,)], "not batched"),
    ([(4,), ()], r"not batched.*float32 \(4,\), float32 \(\)"),
])  # fmt: skip
def test_data_without_batches_are_named_as_such(shapes, words):
    class Unbatched(Small):
        def train_data(self, batch_size):
            arrays = tuple(np.zeros([96, *s], np.float32) for s in shapes)
            return tf.data.Dataset.from_tensor_slices(arrays).shuffle(9)

    with pytest.raises(ctl.UsageError, match=words) as found:
        Unbatched(strategy="default", writers=[]).train(1)
    assert "global_batch_size=" not in str(found.value)


def test_batches_of_another_size_from_a_generator_are_no_missing_batch():
    class Generated(Small):
        def train_data(self, batch_size):
            spec = tf.TensorSpec([4, 8]), tf.TensorSpec([4], tf.int64)
            return tf.data.Dataset.from_generator(lambda: (), output_signature=spec)

    with pytest.raises(ctl.UsageError, match="4 rows at a time.*--global_batch_size=4"):
        Generated(strategy="default", writers=[]).train(1)


def test_another_rhythm_is_no_other_run(tmp_path, caplog):
    where = {"strategy": "default", "writers": [], "model_dir": str(tmp_path)}
    Small(**where).train(1)
    often = {n: ctl.Every(steps=1) for n in ("log", "evaluate", "save")}
    Small(**where, intervals=ctl.Intervals(steps_per_loop=1, **often)).train(2)
    assert "Settings have changed" not in caplog.text


@pytest.mark.parametrize("count, size, warned", [(30, 24, False), (24, 24, False), (40, 20, True)])
def test_only_batches_that_are_never_full_are_warned_of(count, size, warned, caplog):
    class Uncounted(Small):
        def train_data(self, batch_size):
            data = tf.data.Dataset.from_tensor_slices(examples()).take(count)
            return data.filter(lambda x, y: y >= 0).batch(size).repeat()

    Uncounted(strategy="default", writers=[], intervals=every_step(steps_per_loop=1)).train(4)
    assert ("examples on average, global_batch_size is 24" in caplog.text) == warned


def test_a_single_short_batch_is_not_warned_of(caplog):
    class Few(Small):
        def train_data(self, batch_size):
            data = tf.data.Dataset.from_tensor_slices(examples()).take(6)
            return data.filter(lambda x, y: y >= 0).batch(batch_size)

    Few(strategy="default", writers=[], intervals=every_step()).train()
    assert "on average" not in caplog.text


class WithoutUpdate(Small):
    def train_step(self, batch):
        logits = self.model(batch[0], training=True)
        return {"loss": tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)}


class OwnUpdate(Small):
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            logits = self.model(batch[0], training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
@pytest.mark.parametrize("kind", [WithoutUpdate, OwnUpdate, Small])
def test_a_step_that_updates_nothing_is_warned_of_once(kind, replicas, two_replicas, caplog):
    strategy = two_replicas if replicas == 2 else "default"
    trainer = kind(strategy=strategy, writers=[], intervals=every_step(steps_per_loop=1))
    trainer.train(3)
    warnings = [r for r in caplog.messages if "does not call self.minimize(loss, tape)" in r]
    assert len(warnings) == (kind is WithoutUpdate)


def test_a_step_without_an_optimizer_needs_no_update(caplog):
    class Measuring(WithoutUpdate):
        def build(self):
            super().build()
            self.optimizer = None

    Measuring(strategy="default", writers=[]).train(2)
    assert "minimize" not in caplog.text


def test_the_keys_of_a_batch_are_those_of_its_dictionary():
    batch, num_rows = {"x": tf.TensorSpec([4]), "y": tf.TensorSpec([4])}, tf.TensorSpec([])
    assert graph_loop._keys(batch) == graph_loop._keys((batch, num_rows)) == ("x", "y")
    assert graph_loop._keys((num_rows, batch)) == graph_loop._keys(num_rows) == ()
