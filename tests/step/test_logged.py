"""Logged values of a step: sums and means, on one device and on replicas, split, compiled or empty."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import BATCH, Small, every_step, examples


class Logging(Small):
    """A trainer with one row in the last batch, so that replicas have unequal shares."""

    gradient_options = None

    def build(self):
        super().build()
        if self.gradient_options:
            self.gradients = ctl.Gradients(**self.gradient_options)

    def train_data(self, batch_size):
        data = tf.data.Dataset.from_tensor_slices(examples())
        return data.take(BATCH + 1).batch(batch_size)

    def train_step(self, batch):
        x, _ = batch
        scores = super().train_step(batch)
        self.log("row", x[:, 0])
        self.log("rows", tf.ones(tf.shape(x)[:1]), reduce="sum")
        self.log("total", tf.reduce_sum(x[:, 0]), reduce="sum")
        self.log("fixed", 3.0)
        return scores


def logged(**options):
    writer = ctl.MemoryWriter()
    trainer_class = type("Logged", (Logging,), {"gradient_options": options.pop("gradients", None)})
    trainer_class(writers=[writer], intervals=every_step(steps_per_loop=1), **options).train()
    return [{k: v for k, v in values.items() if k in ("row", "rows", "total", "fixed")}
            for run, _, values in writer.rows if run == "train"]  # fmt: skip


def test_the_numbers_are_those_of_numpy():
    x = examples()[0][:, 0].astype(np.float64)
    first, second = logged(strategy="default")
    assert first == pytest.approx(
        {"row": x[:BATCH].mean(), "rows": BATCH, "total": x[:BATCH].sum(), "fixed": 3.0}, rel=1e-5
    )
    assert second == pytest.approx({"row": x[BATCH], "rows": 1, "total": x[BATCH], "fixed": 3.0}, rel=1e-5)


@pytest.mark.parametrize("options", [
    {"strategy": "two", "gradients": {"accumulate_steps": 3}},
    pytest.param({"strategy": "default", "jit_compile": True}, marks=pytest.mark.slow),
    pytest.param({"strategy": "two"}, marks=pytest.mark.slow),
    pytest.param({"strategy": "default", "gradients": {"accumulate_steps": 4}}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_replicas_and_parts_and_xla_log_the_same(options, two_replicas):
    strategy = two_replicas if options["strategy"] == "two" else "default"
    pairs = zip(logged(**{**options, "strategy": strategy}), logged(strategy="default"), strict=True)
    for values, expected in pairs:
        assert values == pytest.approx(expected, rel=1e-5)


def test_several_steps_are_averaged():
    class Twice(Logging):
        def train_data(self, batch_size):
            return super().train_data(batch_size).repeat()

    writer = ctl.MemoryWriter()
    Twice(strategy="default", writers=[writer], intervals=every_step(log=ctl.Every(steps=2))).train(2)
    assert writer.rows[-1][2]["rows"] == (BATCH + 1) / 2


def test_an_eval_step_logs_too():
    class Evaluated(Small):
        def eval_step(self, batch):
            self.log("rows", tf.ones(tf.shape(batch[1])), reduce="sum")
            return super().eval_step(batch)

    assert Evaluated(strategy="default", writers=[], global_batch_size=13).evaluate()["rows"] == 13


def log_in_a_condition(self, batch):
    if tf.reduce_sum(batch[0]) > 0:
        self.log("positive", tf.constant(1.0))


MISTAKES = {
    "name twice": (lambda self, batch: self.log("loss", 1.0), "'loss' and logged it"),
    "logged twice": (lambda self, batch: [self.log("a", 1.0), self.log("a", 1.0)], "'a'.*not logged yet"),
    "no name": (lambda self, batch: self.log(3, 1.0), "the name 3"),
    "a matrix": (lambda self, batch: self.log("x", batch[0]), r"shape \(24, 8\).*are for hooks"),
    "a text": (lambda self, batch: self.log("x", "text"), "string.*are for hooks"),
    "a reduction": (lambda self, batch: self.log("x", 1.0, reduce="max"), "'max'.*'mean' or 'sum'"),
    "a condition": (log_in_a_condition, "'positive'.*within a condition"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_value_that_cannot_be_logged_is_refused(name):
    mistake, error_pattern = MISTAKES[name]

    class Failing(Small):
        def train_step(self, batch):
            mistake(self, batch)
            return super().train_step(batch)

    with pytest.raises(ctl.UsageError, match=error_pattern):
        Failing(strategy="default", writers=[]).train(1)


def test_logging_in_a_function_of_the_user_is_refused():
    class Failing(Small):
        def after_loop(self, step, means):
            tf.function(lambda: self.log("x", tf.constant(1.0)), autograph=False)()

    with pytest.raises(ctl.UsageError, match="'x'.*tf.function that is not a step"):
        Failing(strategy="default", writers=[], intervals=every_step()).train(1)


class TwoOptimizers(Small):
    """Three optimizers: a schedule, a rate that the hook halves after each step, and a constant rate."""

    def build(self):
        super().build()
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.25, 0.125])
        self.optimizer = keras.optimizers.SGD(schedule)
        self.others = [keras.optimizers.SGD(1.0), keras.optimizers.SGD(0.125)]
        self.bias = self.add = tf.Variable([1.0, 2.0])
        self.others[0].build([self.bias])
        self.others[1].build([self.bias])

    def train_step(self, batch):
        scores = super().train_step(batch)
        for optimizer in self.others:
            with tf.GradientTape() as tape:
                loss = self.average(tf.reduce_sum(self.bias) * tf.ones(tf.shape(batch[1])))
            self.minimize(loss, tape, [self.bias], optimizer)
        return scores

    def after_loop(self, step, means):
        self.others[0].learning_rate = self.others[0].learning_rate * 0.5


def test_rates_are_those_that_the_step_used_and_norms_have_the_optimizer_s_name():
    writer = ctl.MemoryWriter()
    TwoOptimizers(strategy="default", writers=[writer], intervals=every_step()).train(3)
    rows = [values for *_, values in writer.rows]
    assert [r["learning_rate"] for r in rows] == [0.5, 0.25, 0.125]
    assert [r["learning_rate/others_0"] for r in rows] == [1.0, 0.5, 0.25]
    assert [r["learning_rate/others_1"] for r in rows] == [0.125] * 3
    for r in rows:
        assert r["gradient_norm"] > 0 and r["gradient_norm/others_0"] == pytest.approx(2**0.5)
        assert r["gradient_norm/others_1"] == pytest.approx(2**0.5)
