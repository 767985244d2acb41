"""Errors for common mistakes in Python: one sentence with a hint, before any step."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.training import graph_loop
from small_models import Small, every_step, examples


def read_value(self, batch):
    print(batch[0].numpy())


def read_with_numpy(self, batch):
    np.mean(batch[0])


def create_variable(self, batch):
    tf.Variable(1.0)


def create_layer(self, batch):
    keras.layers.Dense(4)(batch[0])


def create_optimizer(self, batch):
    self.optimizer = keras.optimizers.Adam()


def mix_dtypes(self, batch):
    return tf.cast(batch[1], tf.float64) - batch[0][:, 0]


def unpack_tensor(self, batch):
    first, second = batch[0]
    return first, second


NO_VALUES = r"tensors have no values yet.*tf\.print.*self\.log.*"
CASES = [
    (read_value, NO_VALUES + "batch\\[0\\].numpy"), (read_with_numpy, NO_VALUES + "np.mean"),
    (create_variable, "creates variables.*build.*Variable"),
    (create_layer, r"creates variables.*build.*(Dense\(4\)|dense\w*/kernel)"),
    (create_optimizer, "creates variables.*build"),
    (mix_dtypes, r"astype\('float32'\).*float32 \(\d+, 8\), int64 \(\d+,\).*batch\[1\]"),
    (unpack_tensor, r"takes a tensor apart.*float32 \(\d+, 8\), int64"),
]  # fmt: skip


MISTAKES = [(mistake.__name__, replicas) for mistake, _ in CASES for replicas in (1, 2)]
FAST_MISTAKES = [m for m in MISTAKES if m[1] == 1 or m[0] in ("create_variable", "unpack_tensor")]


@pytest.mark.parametrize("case", some_of(MISTAKES, *FAST_MISTAKES), ids=str)
def test_a_step_that_cannot_be_traced_is_an_error_with_a_hint(case, two_replicas):
    name, num_replicas = case
    [(mistake, error_pattern)] = [c for c in CASES if c[0].__name__ == name]

    class Mistaken(Small):
        def train_step(self, batch):
            mistake(self, batch)
            return super().train_step(batch)

    trainer = Mistaken(strategy=two_replicas if num_replicas == 2 else "default", writers=[])
    with pytest.raises(ctl.UsageError, match=f"(?s){error_pattern}") as raised:
        trainer.train(1)
    assert trainer.step == 0 and raised.value.exit_code == 2
    assert "site-packages" not in str(raised.value) and "replica_step.py" not in str(raised.value)


def test_an_eval_step_that_cannot_be_traced_is_an_error_with_a_hint():
    class Mistaken(Small):
        def eval_step(self, batch):
            return {"loss": batch[0].numpy()}

    with pytest.raises(ctl.UsageError, match="tensors have no values yet"):
        Mistaken(strategy="default", writers=[]).evaluate()


@pytest.mark.parametrize("call", ["train", "evaluate", "prepare", "predict", "export", "save"])
def test_a_forgotten_init_is_named(call):
    class Forgetful(ctl.Trainer):
        def __init__(self, units):
            self.units = units

    arguments = {"train": (1,), "predict": ([1.0],)}.get(call, ())
    with pytest.raises(ctl.UsageError, match=r"Forgetful.__init__ has not called super\(\).__init__"):
        getattr(Forgetful(3), call)(*arguments)


@pytest.mark.parametrize("shapes, error_pattern", [
    ([(4,), (4,)], r"not batched.*float32 \(4,\), float32 \(4,\)"),
    ([(32, 32, 3), (10,)], "not batched"),
    ([(4,), ()], r"not batched.*float32 \(4,\), float32 \(\)"),
])  # fmt: skip
def test_data_without_batches_are_named_as_such(shapes, error_pattern):
    class Unbatched(Small):
        def train_data(self, batch_size):
            arrays = tuple(np.zeros([96, *s], np.float32) for s in shapes)
            return tf.data.Dataset.from_tensor_slices(arrays).shuffle(9)

    with pytest.raises(ctl.UsageError, match=error_pattern) as raised:
        Unbatched(strategy="default", writers=[]).train(1)
    assert "global_batch_size=" not in str(raised.value)


def test_batches_of_another_size_from_a_generator_are_no_missing_batch():
    class Generated(Small):
        def train_data(self, batch_size):
            spec = tf.TensorSpec([4, 8]), tf.TensorSpec([4], tf.int64)
            return tf.data.Dataset.from_generator(lambda: (), output_signature=spec)

    with pytest.raises(ctl.UsageError, match="4 rows at a time.*--global_batch_size=4"):
        Generated(strategy="default", writers=[]).train(1)


def test_other_intervals_are_no_changed_settings(tmp_path, caplog):
    options = {"strategy": "default", "writers": [], "model_dir": str(tmp_path)}
    Small(**options).train(1)
    every_step_intervals = {n: ctl.Every(steps=1) for n in ("log", "evaluate", "save")}
    Small(**options, intervals=ctl.Intervals(steps_per_loop=1, **every_step_intervals)).train(2)
    assert "Settings have changed" not in caplog.text


@pytest.mark.parametrize("count, size, is_warned", [(30, 24, False), (24, 24, False), (40, 20, True)])
def test_batches_that_are_never_full_log_a_warning(count, size, is_warned, caplog):
    class Uncounted(Small):
        def train_data(self, batch_size):
            data = tf.data.Dataset.from_tensor_slices(examples()).take(count)
            return data.filter(lambda x, y: y >= 0).batch(size).repeat()

    Uncounted(strategy="default", writers=[], intervals=every_step(steps_per_loop=1)).train(4)
    assert ("examples on average, global_batch_size is 24" in caplog.text) == is_warned


def test_a_single_short_batch_logs_no_warning(caplog):
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


@pytest.mark.parametrize("num_replicas", some_of([1, 2], 2))
@pytest.mark.parametrize("trainer_class", [WithoutUpdate, OwnUpdate, Small])
def test_a_step_without_an_update_logs_one_warning(trainer_class, num_replicas, two_replicas, caplog):
    strategy = two_replicas if num_replicas == 2 else "default"
    trainer = trainer_class(strategy=strategy, writers=[], intervals=every_step(steps_per_loop=1))
    trainer.train(3)
    warnings = [r for r in caplog.messages if "does not call self.minimize(loss, tape)" in r]
    assert len(warnings) == (trainer_class is WithoutUpdate)


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
