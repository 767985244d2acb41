"""`ctl.find_learning_rate`: the curve, its end, and the restored state of the trainer."""

import builtins
import random

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.distribute.keras_objects import unwrap
from small_models import Small, digest, every_step

OPTIONS = dict(writers=[], intervals=every_step())
SEARCH = dict(min_rate=1e-3, max_rate=1e3, steps=40)


def two_replicas():
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])


VARIANTS = {
    "keras3": dict(optimizer="adam", dropout=0.3),
    "tf_keras": dict(framework="tf_keras", optimizer="adam"),
    "tf.data": dict(tf_data=True, optimizer="adam"),
    "saved iterator": dict(tf_data=True, optimizer="adam", data_position="iterator"),
    "compiled step": dict(jit_compile="step", optimizer="adam"),
    "compiled loop": dict(jit_compile="loop", optimizer="adam"),
    "two replicas": dict(strategy=two_replicas, optimizer="adam", dropout=0.3),
}


class Searched(Small):
    """Logs a random number of an operation with a state, which XLA does not support."""

    def __init__(self, **options):
        strategy = options.pop("strategy", lambda: "default")
        super().__init__(strategy=strategy(), **OPTIONS | options)
        self._is_compiled = "jit_compile" in options

    def train_step(self, batch):
        scores = super().train_step(batch)
        if self._is_compiled:
            return scores
        return {**scores, "random": tf.random.uniform([])}


def state_of(trainer):
    return {name: v.numpy() for name, v in trainer._prepared_trainer.state.variables.items()}


@pytest.mark.parametrize("variant", some_of(VARIANTS, "two replicas"))
def test_a_training_after_the_search_is_the_same_as_without_it(variant):
    states, rows = [], []
    for searches in (False, True):
        writer = ctl.MemoryWriter()
        trainer = Searched(**VARIANTS[variant], writers=[writer])
        trainer.train(3)
        if searches:
            before = state_of(trainer)
            curve = ctl.find_learning_rate(trainer, **SEARCH)
            assert len(curve.rates) == len(curve.losses) >= 5
            for name, value in state_of(trainer).items():
                np.testing.assert_array_equal(value, before[name], err_msg=name)
            assert trainer.step == 3
        trainer.train(7)
        states.append(state_of(trainer))
        rows.append([values for run, _, values in writer.rows if run == "train"])
    for name in states[0].keys() - {"data_iterator/data_iterator"}:  # its buffers depend on threads
        value = states[0][name]
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)
    for first, second in zip(*rows, strict=True):
        assert first["loss"] == second["loss"] and first.get("random") == second.get("random")


def test_a_search_before_the_first_training_leaves_no_trace():
    digests = []
    for searches in (False, True):
        trainer = Searched(optimizer="adam", tf_data=True, dropout=0.3)
        trainer.prepare()
        if searches:
            ctl.find_learning_rate(trainer, **SEARCH)
        trainer.train(5)
        digests.append(digest(trainer))
    assert digests[0] == digests[1]


def test_the_curve_ends_when_the_loss_diverges_and_suggests_a_falling_part():
    trainer = Small(strategy="default", **OPTIONS)
    curve = ctl.find_learning_rate(trainer, min_rate=1e-4, max_rate=1e6, steps=60)
    assert len(curve.rates) < 60 and curve.rates[0] == pytest.approx(1e-4)
    ratios = np.diff(np.log(curve.rates))
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)
    assert np.all(np.isfinite(curve.losses))
    assert 1e-3 < curve.suggestion < 100
    assert curve.suggestion < curve.rates[int(np.argmin(curve.losses))] * 1.01
    second_curve = ctl.find_learning_rate(trainer, min_rate=1e-4, max_rate=1e6, steps=60)
    assert second_curve == curve


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_that_is_not_finite_ends_the_search(policy):
    class Exploding(Small):
        def score(self, batch, training):
            scores = super().score(batch, training)
            rate = tf.cast(self.optimizer.learning_rate, tf.float32)
            return {"loss": tf.where(rate > 0.1, np.nan, scores["loss"])}

    trainer = Exploding(strategy="default", on_nonfinite=policy, **OPTIONS)
    trainer.prepare()
    before = digest(trainer)
    curve = ctl.find_learning_rate(trainer, min_rate=1e-3, max_rate=10.0, steps=41)
    assert len(curve.rates) == 21 and curve.rates[-1] == pytest.approx(0.1, rel=1e-3)
    assert digest(trainer) == before and trainer.step == 0


def test_an_error_in_the_search_restores_the_trainer(monkeypatch):
    from ctl.training.graph_loop import StepLoop

    trainer = Small(strategy="default", optimizer="adam", **OPTIONS)
    trainer.train(2)
    before, run, calls = state_of(trainer), StepLoop.run, []

    def fail_at_the_third_step(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("lost")
        return run(self, *arguments)

    monkeypatch.setattr(StepLoop, "run", fail_at_the_third_step)
    with pytest.raises(OSError, match="lost"):
        ctl.find_learning_rate(trainer)
    monkeypatch.undo()
    for name, value in state_of(trainer).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


class TwoOptimizers(Small):
    def build(self):
        super().build()
        self.second = keras.optimizers.SGD(0.01)
        self.second.build(self.model.layers[1].trainable_variables)
        self.optimizer.build(self.model.layers[0].trainable_variables)

    def train_step(self, batch):
        with tf.GradientTape(persistent=True) as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        first, second = self.model.layers
        self.minimize(loss, tape, first.trainable_variables)
        self.minimize(loss, tape, second.trainable_variables, self.second)
        rate, second_rate = (unwrap(o.learning_rate) + 0.0 for o in (self.optimizer, self.second))
        return {**scores, "ratio": second_rate / rate, "b": second_rate}


def test_several_optimizers_keep_their_ratio_unless_one_is_named():
    trainer = TwoOptimizers(strategy="default", **OPTIONS)
    search = dict(min_rate=1e-3, max_rate=1e-1, steps=10, smoothing=0.0)
    assert ctl.find_learning_rate(trainer, metric="ratio", **search).losses == pytest.approx([0.1] * 10)
    named = ctl.find_learning_rate(trainer, optimizer="second", metric="b", **search)
    assert named.losses == pytest.approx(named.rates)
    assert float(trainer.optimizer.learning_rate) == pytest.approx(0.1)
    assert float(trainer.second.learning_rate) == pytest.approx(0.01)
    with pytest.raises(ctl.UsageError, match="optimizer is 'third'; expected one of .*optimizer, second"):
        ctl.find_learning_rate(trainer, optimizer="third")


def test_generators_of_python_and_numpy_continue():
    class Drawn(Small):
        def train_data(self, batch_size):
            random.random(), np.random.random()
            return super().train_data(batch_size)

    trainer = Drawn(strategy="default", **OPTIONS)
    trainer.prepare()
    random.seed(3), np.random.seed(3)
    ctl.find_learning_rate(trainer, steps=5)
    drawn = random.random(), np.random.random()
    random.seed(3), np.random.seed(3)
    assert drawn == (random.random(), np.random.random())


def test_a_picture_is_written(tmp_path):
    trainer = Small(strategy="default", **OPTIONS)
    ctl.find_learning_rate(trainer, path=str(tmp_path / "rates.png"), **SEARCH)
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


class Scheduled(Small):
    def build(self):
        super().build()
        self.optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(min_rate=0.0), "0 < min_rate < max_rate"),
        (dict(min_rate=1.0, max_rate=0.1), "0 < min_rate < max_rate"),
        (dict(max_rate=float("nan")), "0 < min_rate < max_rate"),
        (dict(steps=4), "steps is 4; expected an integer, 5 or more"),
        (dict(steps=10.0), "steps is 10.0"),
        (dict(smoothing=1.0), "smoothing is 1.0"),
        (dict(path="rates.xyz"), "path is 'rates.xyz'; expected a file that ends with"),
        (dict(path="/nowhere/rates.png"), "a directory that exists"),
        (dict(metric="lss"), "metric is 'lss'; expected a value that train_step returns: loss"),
    ],
)
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(ctl.UsageError, match=message):
        ctl.find_learning_rate(Small(strategy="default", **OPTIONS), **options)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: keras.Sequential([keras.layers.Dense(1)]), r"got a Sequential.*ctl.KerasTrainer\(model, "),
        (lambda: Small, r"got the class Small; .*Write find_learning_rate\(Small\(global_batch_size="),
        (lambda: 3, "got 3; expected an instance of ctl.Trainer"),
    ],
)
def test_an_object_that_is_no_trainer_is_refused(value, message):
    with pytest.raises(ctl.UsageError, match=message):
        ctl.find_learning_rate(value())


class Regression(ctl.Trainer):
    """Linear regression by gradient descent, whose loss is flat below a rate of 0.01."""

    def build(self):
        self.model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_data(self, batch_size):
        generator = np.random.default_rng(self.seed)
        x, weights = generator.normal(size=(2048, 8)), generator.normal(size=(8, 1))
        y = x @ weights + 0.1 * generator.normal(size=(2048, 1))
        return ctl.from_arrays((x.astype("float32"), y.astype("float32")), batch_size)

    def losses(self, x, y):
        return tf.reduce_mean((self.model(x, training=True) - y) ** 2, axis=1)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            losses = self.losses(*batch)
            loss = self.average(losses)
        self.minimize(loss, tape)
        return {"loss": losses}


class Classification(Regression):
    """Two layers with Adam, for four classes that overlap."""

    def build(self):
        layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(4)]
        self.model, self.optimizer = keras.Sequential(layers), keras.optimizers.Adam(1e-3)

    def train_data(self, batch_size):
        generator = np.random.default_rng(self.seed)
        centres, labels = 0.7 * generator.normal(size=(4, 16)), generator.integers(0, 4, 2048)
        x = centres[labels] + generator.normal(size=(2048, 16))
        return ctl.from_arrays((x.astype("float32"), labels), batch_size)

    def losses(self, x, y):
        logits = self.model(x, training=True)
        return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


class Flat(Regression):
    def train_step(self, batch):
        return {"loss": tf.reduce_mean(batch[1] ** 2, axis=1)}


@pytest.mark.parametrize("seed", some_of(range(20), 0))
@pytest.mark.parametrize(
    ("trainer", "lowest", "highest"), [(Regression, 0.05, 0.5), (Classification, 0.01, 0.1)]
)
def test_the_suggestion_is_within_a_factor_of_10_below_the_divergence(trainer, lowest, highest, seed):
    options = dict(global_batch_size=32, seed=seed, strategy="default", **OPTIONS)
    curve = ctl.find_learning_rate(trainer(**options), min_rate=1e-5, max_rate=10.0)
    assert lowest <= curve.suggestion <= highest
    best = curve.rates[int(np.argmin(curve.losses))]
    assert best / 10.01 <= curve.suggestion < best


@pytest.mark.parametrize("seed", some_of(range(3), 0))
def test_a_loss_that_does_not_fall_has_no_suggestion(seed):
    trainer = Flat(global_batch_size=32, seed=seed, strategy="default", **OPTIONS)
    assert ctl.find_learning_rate(trainer).suggestion is None


def test_optimizers_without_a_variable_rate_are_refused():
    with pytest.raises(ctl.UsageError, match=r"schedule CosineDecay.*SGD\(1e-3\)"):
        ctl.find_learning_rate(Scheduled(strategy="default", **OPTIONS))
    with pytest.raises(ctl.UsageError, match="no variable learning rate"):
        ctl.find_learning_rate(Small(framework="module", strategy="default", **OPTIONS))


def test_data_that_end_too_early_are_refused():
    class Brief(Small):
        def train_data(self, batch_size):
            data = tf.data.Dataset.from_tensors((np.zeros((24, 8), "float32"), np.zeros(24, "int64")))
            return data.repeat(3)

    with pytest.raises(ctl.UsageError, match="train_data ends after 3 steps"):
        ctl.find_learning_rate(Brief(strategy="default", **OPTIONS))


def test_a_missing_matplotlib_is_reported_before_any_work(monkeypatch):
    import_module = builtins.__import__

    def without_matplotlib(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return import_module(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    trainer = Small(strategy="default", **OPTIONS)
    with pytest.raises(ctl.UsageError, match="pip install matplotlib"):
        ctl.find_learning_rate(trainer, path="rates.png")
    assert trainer.model is None


WORKERS = """
import json, sys
import ctl
from small_models import Small, digest, every_step

trainer = Small(strategy="multi_worker", optimizer="adam", writers=[], intervals=every_step())
trainer.train(2)
curve = None
if sys.argv[1] == "search":
    curve = ctl.find_learning_rate(trainer, steps=10, min_rate=1e-3, max_rate=1.0)
trainer.train(5)
print(json.dumps({"digest": digest(trainer), "losses": curve and curve.losses}), flush=True)
"""


@pytest.mark.workers
def test_two_workers_search_together(run_program):
    searched = [r.json for r in run_program(2, ["-c", WORKERS, "search"])]
    unsearched = [r.json for r in run_program(2, ["-c", WORKERS, "no"])]
    assert searched[0] == searched[1]
    assert {r["digest"] for r in searched + unsearched} == {searched[0]["digest"]}
    trainer = Small(strategy="default", optimizer="adam", **OPTIONS)
    trainer.train(2)
    curve = ctl.find_learning_rate(trainer, steps=10, min_rate=1e-3, max_rate=1.0)
    np.testing.assert_allclose(searched[0]["losses"], curve.losses, rtol=1e-4)


PICTURE = """
import os, sys
import ctl
from small_models import Small, every_step

trainer = Small(strategy="multi_worker", writers=[], intervals=every_step())
path = sys.argv[1] if trainer.topology.is_chief or sys.argv[2] == "all" else "/nowhere/else/rates.png"
try:
    curve = ctl.find_learning_rate(trainer, steps=10, min_rate=1e-3, max_rate=1.0, path=path)
    print(os.path.exists(path), flush=True)
except ctl.UsageError as e:
    print(e, flush=True)
    sys.exit(e.exit_code)
"""


@pytest.mark.workers
def test_only_the_chief_checks_and_writes_the_picture(run_program, tmp_path):
    results = run_program(2, ["-c", PICTURE, str(tmp_path / "rates.png"), "chief"])
    assert [r.output.split()[-1] for r in results] == ["True", "False"]


@pytest.mark.workers
def test_a_picture_that_the_chief_cannot_write_is_an_error_of_all_workers(run_program):
    results = run_program(2, ["-c", PICTURE, "/nowhere/rates.png", "all"])
    assert [r.code for r in results] == [2, 2]
    assert "a directory that exists" in results[0].output
    assert "The chief cannot write the picture" in results[1].output
