"""Evaluations of several sets: `eval_data` returns a dictionary of datasets."""

import contextlib
import json
import shutil
from types import SimpleNamespace

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.training import evaluation
from small_models import Small, examples
from tensorboard_runs import LAYOUT, accumulated

STRATEGIES = {"default": {}, "two": {"strategy": "mirrored", "num_virtual_devices": 2}}


def noisy(x):
    return x + np.random.default_rng(3).normal(size=x.shape).astype(np.float32)


def arrays_of_set(name):
    x, y = examples(seed=5)
    return {"clean": (x[:13], y[:13]), "noisy": (noisy(x)[:40], y[:40])}[name]


class SeveralSets(Small):
    """A trainer with two evaluation sets, and a Keras metric."""

    names = ("clean", "noisy")

    def build(self):
        super().build()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def eval_data(self, batch_size):
        return {name: self.open_set(name, batch_size) for name in self.names}

    def open_set(self, name, batch_size):
        x, y = arrays_of_set(name)
        if name == "clean":
            return ctl.from_arrays((x, y), batch_size)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)

    def eval_step(self, batch):
        x, y = batch
        self.accuracy.update_state(y, self.model(x))
        return {**super().eval_step(batch), "accuracy": self.accuracy}


class OneSet(SeveralSets):
    """The same trainer with one of the sets."""

    def __init__(self, name, **options):
        super().__init__(**options)
        self.set_name = name

    def eval_data(self, batch_size):
        return self.open_set(self.set_name, batch_size)


@pytest.mark.parametrize("strategy", some_of(STRATEGIES, "two"))
def test_each_set_has_the_metrics_of_an_evaluation_of_its_own(strategy):
    options = STRATEGIES[strategy]
    means = SeveralSets(writers=[], **options).evaluate()
    assert list(means) == ["clean/loss", "clean/accuracy", "noisy/loss", "noisy/accuracy"]
    for name in ("clean", "noisy"):
        expected = OneSet(name, writers=[], **options).evaluate()
        assert {n: means[f"{name}/{n}"] for n in expected} == pytest.approx(expected, rel=1e-6)


def test_results_callbacks_hooks_and_the_best_checkpoint_refer_to_the_name(tmp_path):
    evaluations = []

    class Watched(SeveralSets):
        def after_evaluation(self, step, means, metrics):
            evaluations.append((step, sorted(means)))

    early_stopping = ctl.EarlyStopping("noisy/loss", patience=1, min_delta=100.0)
    trainer = Watched(
        model_dir=str(tmp_path), keep="1,best=noisy/loss", eval_every_steps=2, writers=[],
        callbacks=[early_stopping],
    )  # fmt: skip
    result = trainer.train(20)
    means = trainer.evaluate()
    assert trainer.step == 4 and evaluations == [(step, sorted(means)) for step in (2, 4, 4)]
    assert result["eval_noisy/loss"] == means["noisy/loss"]
    manifests = sorted((tmp_path / "checkpoints").glob("ckpt-*/manifest.json"))
    assert "noisy/loss" in json.loads(manifests[0].read_text())["metrics"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"keep": "1,best=loss"}, "'loss' is to be kept, but eval_step returns clean/accuracy"),
     ({"callbacks": [ctl.EarlyStopping("loss", patience=1)]}, "clean/loss")],
)  # fmt: skip
def test_a_metric_without_the_name_of_its_set_is_refused_before_training(settings, message, tmp_path):
    trainer = SeveralSets(model_dir=str(tmp_path), eval_every_steps=2, writers=[], **settings)
    with pytest.raises(ctl.UsageError, match=message):
        trainer.train(4)
    assert trainer.step == 0


def scalars(folder):
    """Returns the steps of the shown points by tag."""
    events = accumulated(folder)
    tags = [tag for tag in events.Tags()["tensors"] if tag != LAYOUT and not tag.startswith("_hparams_")]
    return {tag: [event.step for event in events.Tensors(tag)] for tag in tags}


def test_tensorboard_shows_a_run_for_each_set_also_after_a_restart(tmp_path):
    for steps in (2, 4):
        SeveralSets(model_dir=str(tmp_path), eval_every_steps=2).train(steps)
    for name in ("clean", "noisy"):
        tags = scalars(tmp_path / "logs" / "eval" / name)
        assert tags["loss"] == [2, 4] and tags["accuracy"] == [2, 4]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["run"] == "eval" and "clean/loss" in r] == [2, 4]


@pytest.mark.slow
def test_tensorboard_hides_the_points_after_the_step_of_a_restart_also_without_an_evaluation(tmp_path):
    SeveralSets(model_dir=str(tmp_path), eval_every_steps=2).train(4)
    shutil.rmtree(tmp_path / "checkpoints" / "ckpt-4")
    SeveralSets(model_dir=str(tmp_path), save_every_steps=1).train(3)
    assert scalars(tmp_path / "logs" / "eval" / "clean")["loss"] == [2]


def test_tensorboard_keeps_a_name_with_a_slash_that_is_no_set(tmp_path):
    class Slash(Small):
        def eval_step(self, batch):
            return {"top/5": super().eval_step(batch)["loss"]}

    Slash(model_dir=str(tmp_path), eval_every_steps=2).train(2)
    assert scalars(tmp_path / "logs" / "eval") == {"top/5": [2]}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (lambda n: {"a": tf.data.Dataset.range(4).batch(n), "b": np.zeros(4)}, "which b is not a dataset"),
        (lambda n: {"..": tf.data.Dataset.range(4).batch(n)}, r"the name '\.\.'; expected a string"),
        (lambda n: {"a/b": tf.data.Dataset.range(4).batch(n)}, "the name 'a/b'; expected a string"),
        (lambda n: {3: tf.data.Dataset.range(4).batch(n)}, "the name 3; expected a string"),
        (lambda n: {"a": tf.data.Dataset.range(4).batch(n).repeat()}, r"eval_data\['a'\] is endless"),
        (lambda n: {"a": tf.data.Dataset.range(0).batch(n)}, r"eval_data\['a'\].*at least one"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_named(sets, message):
    class Invalid(Small):
        def eval_data(self, batch_size):
            return sets(batch_size)

        def eval_step(self, batch):
            return {"value": tf.cast(batch, tf.float32)}

    with pytest.raises(ctl.UsageError, match=message):
        Invalid(writers=[]).evaluate()


@pytest.mark.parametrize(
    ("other_names", "is_equal"),
    [(["clean", "noisy"], True), (["noisy", "clean"], False), (["clean"], False), ([""], False)],
)
def test_workers_must_have_the_same_sets_in_the_same_order(other_names, is_equal, monkeypatch):
    class TwoWorkers:
        num_workers = 2

        def __init__(self, other_checksum=None):
            self.checksum, self.other_checksum = None, other_checksum

        def sum(self, values):
            if len(values) == 1 and values[0] > 1:
                self.checksum = values[0]
                return [values[0] + (self.other_checksum or values[0])]
            return [*values]  # errors: the other worker has none

    def open_sets(names, all_reduce):
        monkeypatch.setattr(evaluation.input_pipeline, "open_eval_sets", lambda _: dict.fromkeys(names))
        return evaluation._open_sets(SimpleNamespace(world=SimpleNamespace(host_all_reduce=all_reduce)))

    other = TwoWorkers()
    open_sets(other_names, other)
    expected_error = pytest.raises(ctl.UsageError, match="returned clean, noisy; expected the eval")
    with contextlib.nullcontext() if is_equal else expected_error:
        assert list(open_sets(["clean", "noisy"], TwoWorkers(other.checksum))) == ["clean", "noisy"]


class OtherValues(SeveralSets):
    """Sets with other parts and other values of the step."""

    def open_set(self, name, batch_size):
        numbers = np.arange(6, dtype=np.float32)
        parts = {"x": numbers} if name == "clean" else {"x": numbers, "label": numbers % 2}
        return tf.data.Dataset.from_tensor_slices(parts).batch(batch_size)

    def eval_step(self, batch):
        if "label" not in batch:
            return {"sum": batch["x"] + 1.0}
        self.accuracy.update_state(batch["label"], tf.one_hot(tf.ones(tf.shape(batch["x"]), tf.int32), 2))
        return {"label": batch["label"], "twice": 2 * batch["x"], "accuracy": self.accuracy}


def test_sets_may_have_other_parts_and_other_values_in_each_evaluation():
    trainer = OtherValues(writers=[])
    for _ in range(2):
        assert trainer.evaluate() == {
            "clean/sum": 3.5, "noisy/label": 0.5, "noisy/twice": 5.0, "noisy/accuracy": 0.5,
        }  # fmt: skip


def test_a_dictionary_of_arrays_is_one_set():
    class Arrays(Small):
        def eval_data(self, batch_size):
            return {"a": np.arange(4.0), "b": np.arange(4.0)}

        def eval_step(self, batch):
            return {"sum": batch["a"] + batch["b"]}

    assert Arrays(writers=[]).evaluate() == {"sum": 3.0}


def test_arrays_of_different_numbers_of_rows_are_refused_with_the_way_to_write_several_sets():
    class Unwrapped(SeveralSets):
        def eval_data(self, batch_size):
            return {name: arrays_of_set(name) for name in self.names}

    message = r"different numbers of rows \(clean: 13, noisy: 40\).* wrap each in ctl.from_arrays"
    with pytest.raises(ctl.UsageError, match=message):
        Unwrapped(writers=[]).evaluate()


def test_the_number_of_batches_is_limited_for_each_set():
    class Counted(SeveralSets):
        def open_set(self, name, batch_size):
            return tf.data.Dataset.range({"clean": 8, "noisy": 12}[name]).batch(4)

        def eval_step(self, batch):
            return {"value": tf.cast(batch, tf.float32)}

    means = Counted(writers=[], max_eval_batches=2).evaluate()
    assert means == {"clean/value": 3.5, "noisy/value": 3.5}
