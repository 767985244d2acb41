"""Early stopping, plateaus and best models: as Keras decides, and as an unbroken run after a resume."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import Small, every_step, weights


def told(watcher, values, name="loss", run="eval"):
    return [watcher.saw(step, {name: v}, run) for step, v in enumerate(values, 1)]


def curves():
    generator = np.random.default_rng(0)
    for _ in range(40):
        yield np.round(generator.normal(size=25).cumsum(), 2).tolist()


class Recorder:
    """What a Keras callback needs of a model."""

    def __init__(self):
        self.stop_training, self.weights = False, 0
        self.optimizer = keras.optimizers.SGD(1.0)

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights = weights


@pytest.mark.parametrize("options", [
    {"patience": 0}, {"patience": 3}, {"patience": 2, "min_delta": 0.5}, {"patience": 2, "baseline": -1.0},
    {"patience": 2, "start_from": 4}, {"patience": 2, "mode": "max"},
], ids=str)  # fmt: skip
def test_early_stopping_stops_where_that_of_keras_does(options):
    known = {"start_from": "start_from_epoch"}
    for values in curves():
        mine = ctl.EarlyStopping("loss", **options)
        theirs = keras.callbacks.EarlyStopping(
            "loss", **{"mode": "min", **{known.get(k, k): v for k, v in options.items()}}
        )
        theirs.set_model(Recorder())
        theirs.on_train_begin()
        found = next((i for i, v in enumerate(told(mine, values)) if v.stop), None)
        expected = None
        for epoch, value in enumerate(values):
            theirs.on_epoch_end(epoch, {"loss": value})
            if theirs.model.stop_training:
                expected = epoch
                break
        assert found == expected


@pytest.mark.parametrize("options", [
    {"patience": 2}, {"patience": 1, "cooldown": 3}, {"patience": 3, "min_delta": 1.0},
    {"patience": 2, "mode": "max", "factor": 0.5},
], ids=str)  # fmt: skip
def test_a_plateau_lowers_the_learning_rate_where_that_of_keras_does(options):
    for values in curves():
        mine = ctl.ReduceOnPlateau("loss", **options)
        theirs = keras.callbacks.ReduceLROnPlateau("loss", **{"mode": "min", **options})
        theirs.set_model(Recorder())
        theirs.on_train_begin()
        rates = []
        for epoch, value in enumerate(values):
            before = float(theirs.model.optimizer.learning_rate)
            theirs.on_epoch_end(epoch, {"loss": value})
            rates.append(float(theirs.model.optimizer.learning_rate) / before)
        assert [v.factor for v in told(mine, values)] == pytest.approx(rates)


def test_a_restored_watcher_decides_as_one_that_was_never_interrupted():
    makes = (
        lambda: ctl.EarlyStopping("loss", patience=3),
        lambda: ctl.ReduceOnPlateau("loss", patience=2, cooldown=2),
        lambda: ctl.SaveBest("loss"),
    )
    for make in makes:
        for values in curves():
            whole = told(make(), values)
            first, second = make(), make()
            before = told(first, values[:11])
            second.state = first.state
            assert before + told(second, values[11:]) == whole


def test_nan_never_is_the_best():
    watcher = ctl.SaveBest("accuracy")
    assert [v.export for v in told(watcher, [float("nan"), 0.5, float("nan"), 0.4, 0.6], "accuracy")] == [
        False, True, False, False, True,
    ]  # fmt: skip


class Watched(Small):
    """Evaluated every 2 steps; a learning rate so large that the loss soon grows."""

    def __init__(self, part=None, rate=0.1, **options):
        super().__init__(**options)
        self.part, self.rate = part, rate

    def build(self):
        super().build()
        self.optimizer = keras.optimizers.SGD(self.rate)
        for name, value in (self.part() if self.part else {}).items():
            setattr(self, name, value)


def run(part, steps=40, directory=None, rate=0.1, **more):
    writer = ctl.MemoryWriter()
    trainer = Watched(
        part, rate, strategy=more.pop("strategy", "default"), writers=[writer], model_dir=directory,
        intervals=every_step(evaluate=ctl.Every(steps=2), **more),
    )  # fmt: skip
    trainer.train(steps)
    evals = [(step, values["loss"]) for run, step, values in writer.rows if run == "eval"]
    return trainer, evals


def test_a_run_stops_early_stays_so_and_has_its_best_weights(tmp_path, two_replicas):
    def part():
        return {"early_stopping": ctl.EarlyStopping("loss", patience=2, restore_best=True)}

    for strategy in ("default", two_replicas):
        directory = tmp_path / str(strategy == "default")
        trainer, evals = run(part, directory=directory, rate=8.0, strategy=strategy)
        best = min(evals, key=lambda e: e[1])
        assert trainer.step < 40 and trainer.step == evals[-1][0]
        assert trainer.evaluate()["loss"] == pytest.approx(best[1], abs=1e-6)
        again, _ = run(part, directory=directory, rate=8.0, strategy=strategy)
        assert again.step == trainer.step, "an early stop is for good"
        assert again.evaluate()["loss"] == pytest.approx(best[1], abs=1e-6)


def test_the_best_weights_of_a_resumed_run_keep_their_type(tmp_path):
    class Half(Watched):
        def build(self):
            super().build()
            self.model.half = tf.Variable([1.5, -2.0], dtype=tf.bfloat16, trainable=False)

    def trainer():
        part = {"early_stopping": ctl.EarlyStopping("loss", patience=40, restore_best=True)}
        return Half(lambda: part, 8.0, strategy="default", writers=[], model_dir=str(tmp_path),
                    intervals=every_step(evaluate=ctl.Every(steps=2)), framework="module")  # fmt: skip

    trainer().train(6)
    again = trainer()
    again.train(8)
    assert again.model.half.dtype == tf.bfloat16 and list(again.model.half.numpy()) == [1.5, -2.0]


def test_an_interrupted_run_stops_where_the_unbroken_one_does(tmp_path):
    def part():
        return {"early_stopping": ctl.EarlyStopping("loss", patience=4),
                "plateau": ctl.ReduceOnPlateau("loss", patience=2, factor=0.5)}  # fmt: skip

    whole, evals = run(part, rate=8.0)
    assert 14 < whole.step < 40
    rate = float(whole.optimizer.learning_rate)
    assert rate < 8.0
    run(part, steps=13, directory=tmp_path, rate=8.0)
    resumed, _ = run(part, directory=tmp_path, rate=8.0)
    assert resumed.step == whole.step
    assert float(resumed.optimizer.learning_rate) == rate
    for a, b in zip(weights(whole), weights(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_numbers_of_training_are_watched_at_marks_only(tmp_path):
    def part():
        return {"early_stopping": ctl.EarlyStopping("loss", patience=2, run="train")}

    whole, _ = run(part, rate=8.0, log=ctl.Every(steps=2))
    assert whole.step < 40
    for steps in (3, 5, 7, 40):  # each run but the last ends between two marks
        resumed, _ = run(part, steps=steps, directory=tmp_path, rate=8.0, log=ctl.Every(steps=2))
    assert resumed.step == whole.step


def test_the_best_model_is_written_and_only_that(tmp_path):
    def part():
        return {"save_best": ctl.SaveBest("val_loss", formats=["keras", "weights"])}

    trainer, evals = run(part, directory=tmp_path, rate=8.0)
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == ["model.keras", "model.weights.h5"]
    trainer.model.load_weights(tmp_path / "best" / "model.weights.h5")
    assert trainer.evaluate()["loss"] == pytest.approx(min(loss for _, loss in evals), abs=1e-6)


TWOS = every_step(evaluate=ctl.Every(steps=2))


def scheduled():
    return {"plateau": ctl.ReduceOnPlateau("loss")}


class Scheduled(Watched):
    def build(self):
        super().build()
        self.optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: run(lambda: {"early_stopping": "loss"}), "expected e.g. ctl.EarlyStopping"),
        (lambda: run(lambda: {"early_stopping": ctl.EarlyStopping("acc")}), "the eval numbers are loss"),
        (lambda: run(lambda: {"save_best": ctl.SaveBest("loss")}), "needs a place"),
        (lambda: Scheduled(scheduled, intervals=TWOS, writers=[]).train(2), "as a schedule"),
        (lambda: ctl.EarlyStopping("loss", patiance=3), "patiance"),
        (lambda: ctl.EarlyStopping("loss", patience=-1), "patience is -1"),
        (lambda: ctl.ReduceOnPlateau("loss", factor=2.0), "factor is 2.0"),
    ],
)  # fmt: skip
def test_what_would_never_work_is_refused(make, words):
    with pytest.raises((ctl.UsageError, TypeError), match=words):
        make()
