"""Unsuitable data and values of a step are refused, with the expected ones, before the first step."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import Small, every_step, examples

TWO = {"strategy": "mirrored", "num_virtual_devices": 2}


def batches(size=24):
    return tf.data.Dataset.from_tensor_slices(examples()).repeat().batch(size, drop_remainder=True)


class OwnInput(Small):
    """Reads what `source()` returns."""

    train_data = None

    def __init__(self, source, **options):
        super().__init__(**options)
        self.source = source

    def train_data_fn(self, context):
        return self.source()


class Input(Small):
    def __init__(self, source, **options):
        super().__init__(**options)
        self.source = source

    def train_data(self, batch_size):
        return self.source()


class EvalInput(Input):
    train_data = Small.train_data

    def eval_data(self, batch_size):
        return self.source()


def unreadable():
    return tf.data.Dataset.from_tensors(tf.io.read_file("/nowhere/a.txt"))


def unfit():
    return tf.data.Dataset.from_tensors(tf.ones([2]) + tf.ones([3]))


CASES = {
    "no dataset of a worker": (OwnInput, examples, {}, "train_data_fn returned a tuple; expected a tf"),
    "nothing, limited": (
        OwnInput, lambda: None, {"overfit_batches": 2}, "train_data_fn returned a NoneType; .*`return`"
    ),
    "global batches of a worker": (
        OwnInput, batches, TWO, r"yields 24 rows at a time; expected 12.*get_per_replica_batch_size\(24\)"
    ),
    "iterator of a worker": (
        OwnInput, batches, {"data_position": "iterator"}, "there is none with train_data_fn. Leave it out"
    ),
    "compiled loop of a worker": (
        OwnInput, batches, {"jit_compile": "loop"}, r"a pipeline per worker \(train_data_fn\)"
    ),
    "no sets": (
        EvalInput, dict, {"intervals": every_step(evaluate=ctl.Every(steps=1))},
        "eval_data returned an empty dictionary; expected data",
    ),
    "a missing file": (Input, unreadable, {}, r"train_data\(\) cannot read its data: .*/nowhere/a.txt"),
    "a function": (Input, lambda: batches, {}, r"Call it: return batches\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_unsuitable_data_are_refused_before_the_first_step(case):
    trainer_class, source, options, message = CASES[case]
    trainer = trainer_class(source, **{"strategy": "default", "writers": [], **options})
    with pytest.raises(ctl.UsageError, match=message) as raised:
        trainer.train(2)
    assert raised.value.exit_code == 2 and trainer.step == 0


def test_an_error_of_the_user_s_own_code_is_not_changed():
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"):
        Input(unfit, strategy="default", writers=[]).train(2)


class Step(Small):
    """Executes `step(trainer, loss per example)` in the training step, and returns its result."""

    def __init__(self, step, **options):
        super().__init__(**options)
        self.step_of_user = step

    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch):
        with tf.GradientTape() as tape:
            values = self.score(batch, training=True)["loss"]
            loss = self.average(values)
        self.minimize(loss, tape)
        return self.step_of_user(self, values)


def log_in_condition(trainer, values):
    def log():
        trainer.log("large", tf.reduce_max(values))
        return 1.0

    tf.cond(tf.reduce_max(values) > 0.0, log, lambda: 0.0)
    return {"loss": values}


STEPS = {
    "another shape": (
        lambda t, v: {"loss": t.average(v, mask=tf.ones([3, 2]))},
        r"values of shape \(24,\) and a mask of shape \(3, 2\); expected the same shape",
    ),
    "three values": (lambda t, v: {"loss": (v, v, v)}, "returned 3 values as 'loss'; expected one, or"),
    "log in a condition": (log_in_condition, r"log\('large'\) is called within a condition"),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_an_unsuitable_value_of_a_step_is_refused(case):
    step, message = STEPS[case]
    trainer = Step(step, strategy="default", writers=[])
    with pytest.raises(ctl.UsageError, match=message):
        trainer.train(2)
    assert trainer.step == 0


class WithoutOptimizer(Small):
    def build(self):
        super().build()
        self.optimizer = None


def test_minimize_without_an_optimizer_names_the_fix():
    with pytest.raises(ctl.UsageError, match=r"needs an optimizer; set self\.optimizer in build\(\)"):
        WithoutOptimizer(strategy="default", writers=[]).train(1)


def test_no_data_to_predict_or_evaluate_are_refused():
    empty = batches().take(2).filter(lambda *_: False)
    with pytest.raises(ctl.UsageError, match="predict's data ended before its first batch"):
        Small(strategy="default", writers=[]).predict(empty)
    with pytest.raises(ctl.UsageError, match="eval_data ended before its first batch"):
        EvalInput(lambda: empty, strategy="default", writers=[]).evaluate()


def test_an_export_without_any_model_names_the_fix(tmp_path):
    class Empty(Small):
        def build(self):
            super().build()
            self.model = None

    trainer = Empty(strategy="default", writers=[])
    with pytest.raises(ctl.UsageError, match=r"self\.model is not set.*Set self\.model in build\(\)"):
        trainer.export("keras", directory=str(tmp_path))


def test_a_model_of_keras_is_predicted_with_its_own_step():
    class Doubled(keras.Sequential):
        def predict_step(self, data):
            return 2 * self(data[0])

    class Own(Small):
        def build(self):
            super().build()
            self.model = Doubled([keras.Input((8,)), *self.model.layers])

    trainer = Own(strategy="default", writers=[])
    x = examples()[0][:5]
    np.testing.assert_allclose(trainer.predict(x), 2 * trainer.model(x), rtol=1e-5)
