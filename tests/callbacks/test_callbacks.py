"""Early stopping, plateaus and best models: decisions compared with Keras, also after a resume."""

import dataclasses
import json
import re

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.metrics.protocol import Ended
from small_models import Small, every_step, weights


def decisions_of(callback, values, name="loss", run="eval", first_step=1):
    decisions = [callback.on_metrics(step, {name: v}, run) for step, v in enumerate(values, first_step)]
    return [decision or ctl.Decision() for decision in decisions]


def curves():
    generator = np.random.default_rng(0)
    for _ in range(15):
        yield np.round(generator.normal(size=25).cumsum(), 2).tolist()


class Recorder:
    """Model with the attributes that a Keras callback uses."""

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
    keras_name = {"start_from": "start_from_epoch"}
    for values in curves():
        callback = ctl.EarlyStopping("loss", **options)
        keras_callback = keras.callbacks.EarlyStopping(
            "loss", **{"mode": "min", **{keras_name.get(k, k): v for k, v in options.items()}}
        )
        keras_callback.set_model(Recorder())
        keras_callback.on_train_begin()
        stop_index = next((i for i, v in enumerate(decisions_of(callback, values)) if v.stop), None)
        expected = None
        for epoch, value in enumerate(values):
            keras_callback.on_epoch_end(epoch, {"loss": value})
            if keras_callback.model.stop_training:
                expected = epoch
                break
        assert stop_index == expected


@pytest.mark.parametrize("options", [
    {"patience": 2}, {"patience": 1, "cooldown": 3}, {"patience": 3, "min_delta": 1.0},
    {"patience": 2, "mode": "max", "factor": 0.5},
], ids=str)  # fmt: skip
def test_a_plateau_lowers_the_learning_rate_where_that_of_keras_does(options):
    for values in curves():
        callback = ctl.ReduceOnPlateau("loss", **options)
        keras_callback = keras.callbacks.ReduceLROnPlateau("loss", **{"mode": "min", **options})
        keras_callback.set_model(Recorder())
        keras_callback.on_train_begin()
        rates = []
        for epoch, value in enumerate(values):
            before = float(keras_callback.model.optimizer.learning_rate)
            keras_callback.on_epoch_end(epoch, {"loss": value})
            rates.append(float(keras_callback.model.optimizer.learning_rate) / before)
        assert [v.learning_rate_factor for v in decisions_of(callback, values)] == pytest.approx(rates)


def test_a_restored_callback_decides_like_an_uninterrupted_one():
    makes = (
        lambda: ctl.EarlyStopping("loss", patience=3),
        lambda: ctl.ReduceOnPlateau("loss", patience=2, cooldown=2),
        lambda: ctl.SaveBest("loss"),
    )
    for make in makes:
        for values in curves():
            uninterrupted = decisions_of(make(), values)
            first, second = make(), make()
            before = decisions_of(first, values[:11])
            second.state = first.state
            assert before + decisions_of(second, values[11:], first_step=12) == uninterrupted


def test_nan_never_is_the_best():
    callback = ctl.SaveBest("accuracy")
    values = [float("nan"), 0.5, float("nan"), 0.4, 0.6]
    exported = [bool(decision.export) for decision in decisions_of(callback, values, "accuracy")]
    assert exported == [False, True, False, False, True]


class Watched(Small):
    """Trainer with callbacks. A large learning rate makes the loss grow soon."""

    def __init__(self, make_callbacks=None, rate=0.1, **options):
        super().__init__(**options)
        self.make_callbacks, self.rate = make_callbacks, rate

    def build(self):
        super().build()
        self.optimizer = keras.optimizers.SGD(self.rate)
        self.callbacks += self.make_callbacks() if self.make_callbacks else []


def run(make_callbacks, steps=40, directory=None, rate=0.1, strategy="default", **interval_options):
    writer = ctl.MemoryWriter()
    trainer = Watched(
        make_callbacks, rate, strategy=strategy, writers=[writer], model_dir=directory,
        intervals=every_step(evaluate=ctl.Every(steps=2), **interval_options),
    )  # fmt: skip
    trainer.train(steps)
    evals = [(step, values["loss"]) for run, step, values in writer.rows if run == "eval"]
    return trainer, evals


@pytest.mark.parametrize("replicas", some_of([1, 2], 2))
def test_a_run_stops_early_stays_so_and_has_its_best_weights(replicas, tmp_path, two_replicas):
    def make_callbacks():
        return [ctl.EarlyStopping("loss", patience=2, restore_best=True)]

    strategy = two_replicas if replicas == 2 else "default"
    trainer, evals = run(make_callbacks, directory=tmp_path, rate=8.0, strategy=strategy)
    best = min(evals, key=lambda e: e[1])
    assert trainer.step < 40 and trainer.step == evals[-1][0]
    assert trainer.evaluate()["loss"] == pytest.approx(best[1], abs=1e-6)
    resumed, _ = run(make_callbacks, directory=tmp_path, rate=8.0, strategy=strategy)
    assert resumed.step == trainer.step, "an early stop is permanent"
    assert resumed.evaluate()["loss"] == pytest.approx(best[1], abs=1e-6)


@pytest.mark.parametrize("run_name", some_of(["eval", "train"]))
def test_a_run_with_restored_weights_reports_their_metrics(run_name, tmp_path, two_replicas):
    noun, prefix = ("evaluation", "eval_") if run_name == "eval" else ("log interval", "")
    for strategy in ("default", two_replicas):
        writer, directory = EndRecorder(), tmp_path / str(strategy == "default")

        def trained(writer, strategy=strategy, directory=directory):
            stop = ctl.EarlyStopping("loss", patience=2, restore_best=True, run=run_name)
            intervals = every_step(evaluate=ctl.Every(steps=2), log=ctl.Every(steps=1))
            trainer = Watched(lambda: [stop], 8.0, strategy=strategy, writers=[writer],
                              model_dir=str(directory), intervals=intervals)  # fmt: skip
            return trainer, trainer.train(40)

        trainer, results = trained(writer)
        best = results["best_step"]
        metrics = {step: values for run, step, values in writer.rows if run == run_name}
        assert metrics[best]["loss"] == min(values["loss"] for values in metrics.values())
        assert results[f"{prefix}loss"] == metrics[best]["loss"]
        if run_name == "eval":
            assert {f"eval_{name}" for name in metrics[best]} <= {*results}
            assert trainer.evaluate()["loss"] == pytest.approx(results["eval_loss"], abs=1e-6)
            assert writer.ended.summary["eval loss"] == results["eval_loss"]
        assert writer.ended.summary["best step"] == str(best)
        stopped, restored = writer.ended.sentences
        assert restored == f"Restored the weights of step {best}."
        assert re.fullmatch(
            rf"Stopped at step {trainer.step}: {run_name} loss has not improved for 2 {noun}s; best "
            rf"[\d.e-]+ at step {best}\.", stopped,
        )  # fmt: skip
        resumed, repeated_results = trained(writer)  # the run is complete
        assert resumed.step == trainer.step and repeated_results["best_step"] == best
        assert repeated_results[f"{prefix}loss"] == results[f"{prefix}loss"]
        assert writer.ended.sentences == (restored,)


class EndRecorder(ctl.MemoryWriter):
    """Stores the newest `Ended` event, and the metrics of all runs."""

    def note(self, event):
        super().note(event)
        if isinstance(event, Ended):
            self.ended = event


def test_the_best_weights_of_a_resumed_run_keep_their_type(tmp_path):
    class WithBfloat16(Watched):
        def build(self):
            super().build()
            self.model.half = tf.Variable([1.5, -2.0], dtype=tf.bfloat16, trainable=False)

    def trainer():
        callbacks = [ctl.EarlyStopping("loss", patience=40, restore_best=True)]
        return WithBfloat16(lambda: callbacks, 8.0, strategy="default", writers=[], model_dir=str(tmp_path),
                            intervals=EVERY_2, framework="module")  # fmt: skip

    trainer().train(6)
    resumed = trainer()
    resumed.train(8)
    assert resumed.model.half.dtype == tf.bfloat16 and list(resumed.model.half.numpy()) == [1.5, -2.0]


def test_an_interrupted_run_stops_at_the_step_of_an_uninterrupted_one(tmp_path):
    def make_callbacks():
        return [ctl.EarlyStopping("loss", patience=4),
                ctl.ReduceOnPlateau("loss", patience=2, factor=0.5)]  # fmt: skip

    uninterrupted, evals = run(make_callbacks, rate=8.0)
    assert 14 < uninterrupted.step < 40
    rate = float(uninterrupted.optimizer.learning_rate)
    assert rate < 8.0
    run(make_callbacks, steps=13, directory=tmp_path, rate=8.0)
    resumed, _ = run(make_callbacks, directory=tmp_path, rate=8.0)
    assert resumed.step == uninterrupted.step
    assert float(resumed.optimizer.learning_rate) == rate
    for a, b in zip(weights(uninterrupted), weights(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_training_metrics_are_monitored_at_log_steps_only(tmp_path):
    def make_callbacks():
        return [ctl.EarlyStopping("loss", patience=2, run="train")]

    uninterrupted, _ = run(make_callbacks, rate=8.0, log=ctl.Every(steps=2))
    assert uninterrupted.step < 40
    for steps in (5, 40):  # the first run ends between two log steps
        resumed, _ = run(make_callbacks, steps=steps, directory=tmp_path, rate=8.0, log=ctl.Every(steps=2))
    assert resumed.step == uninterrupted.step


def test_the_best_model_is_written_and_only_that(tmp_path):
    def make_callbacks():
        return [ctl.SaveBest("val_loss", formats=["keras", "weights"])]

    trainer, evals = run(make_callbacks, directory=tmp_path, rate=8.0)
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == ["model.keras", "model.weights.h5"]
    trainer.model.load_weights(tmp_path / "best" / "model.weights.h5")
    assert trainer.evaluate()["loss"] == pytest.approx(min(loss for _, loss in evals), abs=1e-6)


EVERY_2 = every_step(evaluate=ctl.Every(steps=2))


def scheduled():
    return [ctl.ReduceOnPlateau("loss")]


class Scheduled(Watched):
    def build(self):
        super().build()
        self.optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: run(lambda: ["loss"]), "expected an object with on_metrics"),
        (lambda: run(lambda: [ctl.EarlyStopping("acc")]), "the eval metrics are loss"),
        (lambda: run(lambda: [ctl.SaveBest("loss")]), "needs a directory"),
        (lambda: Scheduled(scheduled, intervals=EVERY_2, writers=[]).train(2), "as a schedule"),
        (lambda: ctl.EarlyStopping("loss", patiance=3), "patiance"),
        (lambda: ctl.EarlyStopping("loss", patience=-1), "patience is -1"),
        (lambda: ctl.ReduceOnPlateau("loss", factor=2.0), "factor is 2.0"),
    ],
)  # fmt: skip
def test_invalid_callbacks_are_refused(make, message):
    with pytest.raises((ctl.UsageError, TypeError), match=message):
        make()


class Decides:
    """Callback with a decision at one step. Its state counts the calls."""

    def __init__(self, at, decision, run="eval"):
        self.at, self.decision, self.of = at, decision, run
        self.state = {"count": 0}

    def on_metrics(self, step, values, run):
        self.state = {"count": self.state["count"] + 1}
        return self.decision if (run, step) == (self.of, self.at) else None


@pytest.mark.parametrize("make", [ctl.NullCallback, ctl.MemoryCallback, lambda: ctl.EarlyStopping("loss"),
                                  lambda: ctl.ReduceOnPlateau("loss"), lambda: ctl.SaveBest("loss"),
                                  ctl.LossSpike])  # fmt: skip
def test_every_callback_fulfils_the_protocol_and_accepts_any_number(make):
    callback = make()
    assert isinstance(callback, ctl.Callback)
    for step, value in enumerate([1.0, float("nan"), float("inf"), 0.5]):
        for run in ("train", "eval"):
            decision = callback.on_metrics(step, {"loss": value}, run)
            assert decision is None or isinstance(decision, ctl.Decision)
    if hasattr(callback, "state"):
        other = make()
        other.state = json.loads(json.dumps(callback.state))
        assert other.state == callback.state


def test_decisions_of_a_custom_callback_are_carried_out(tmp_path, caplog):
    callbacks = [
        Decides(2, ctl.Decision(learning_rate_factor=0.5, message="too fast")),
        Decides(4, ctl.Decision(export=["weights"], directory=str(tmp_path / "mine"), keep_weights=True)),
        Decides(6, ctl.Decision(stop=True, message="enough")),
    ]
    trainer, evals = run(lambda: callbacks, directory=tmp_path / "run")
    assert trainer.step == 6 and float(trainer.optimizer.learning_rate) == pytest.approx(0.05)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["model.weights.h5"]
    assert trainer.evaluate()["loss"] == dict(evals)[4], "the model has the stored weights"
    log_text = "\n".join(r.getMessage() for r in caplog.records)
    assert "Step 2: too fast." in log_text and "Stopping at step 6: enough." in log_text


def test_a_custom_callback_rolls_the_run_back(tmp_path):
    class Once(ctl.NullCallback):
        can_roll_back = True

        def on_metrics(self, step, values, run):
            should_roll_back = self.can_roll_back and (run, step) == ("train", 5)
            self.can_roll_back &= not should_roll_back
            return ctl.Decision(roll_back=True) if should_roll_back else None

    memory = ctl.MemoryCallback()
    trainer, _ = run(lambda: [Once(), memory], steps=8, directory=tmp_path, save=ctl.Every(steps=2))
    steps = [step for run, step, _ in memory.seen if run == "train"]
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8] and trainer.step == 8


def test_states_are_saved_by_name_and_two_of_a_kind_do_not_mix(tmp_path):
    def make_callbacks():
        return [Decides(99, None), Decides(99, None, run="train"), ctl.EarlyStopping("loss", patience=50)]

    run(make_callbacks, steps=4, directory=tmp_path)
    callbacks = make_callbacks()
    trainer, _ = run(lambda: callbacks, steps=6, directory=tmp_path)
    assert [c.state["count"] for c in callbacks[:2]] == [9, 9], "6 logs and 3 evaluations in total"
    assert callbacks[2].state["seen"] == 3
    prepared = trainer._prepared_trainer
    saved = prepared.checkpointing.manager.restore(prepared.state).state["watchers"]
    assert sorted(saved) == ["Decides", "Decides_1", "early_stopping"]


DECISIONS_BY_WORKER_PROGRAM = """
import json, os
import ctl
from small_models import Small, digest, every_step

is_chief = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0

class Alone:
    "Each worker makes a different decision."
    def on_metrics(self, step, values, run):
        if is_chief:
            return ctl.Decision(stop=step == 4, learning_rate_factor=0.5)
        return ctl.Decision(stop=step == 2, learning_rate_factor=0.1)

trainer = Small(strategy="multi_worker", writers=[], intervals=every_step(), callbacks=[Alone()])
trainer.train(9)
rate = float(trainer.optimizer.learning_rate.numpy())
print(json.dumps({"step": trainer.step, "rate": round(rate, 6), "digest": digest(trainer)}), flush=True)
"""


@pytest.mark.workers
def test_the_chief_s_decisions_are_carried_out_on_all_workers(run_program):
    chief, worker = (result.json for result in run_program(2, ["-c", DECISIONS_BY_WORKER_PROGRAM]))
    assert chief == worker and chief["step"] == 4 and chief["rate"] == round(0.1 * 0.5**4, 6)


def test_a_keras_callback_is_refused_with_the_expected_type():
    with pytest.raises(ctl.UsageError, match=r"callbacks\[0\] is .* of Keras, which is for ctl.fit"):
        run(lambda: [keras.callbacks.EarlyStopping()])


def test_a_decision_accepts_numpy_values_and_paths_and_holds_plain_values(tmp_path):
    decision = ctl.Decision(stop=np.bool_(True), learning_rate_factor=np.float32(0.5), export=["keras"],
                        directory=tmp_path)  # fmt: skip
    assert json.loads(json.dumps(dataclasses.asdict(decision)))["directory"] == str(tmp_path)
    assert decision.stop is True and decision.export == ("keras",) == ctl.Decision(export="keras").export
    with pytest.raises(ctl.UsageError, match="of the wrong type"):
        ctl.Decision(learning_rate_factor="half")


@pytest.mark.parametrize(
    ("decision", "trainer_class", "message"),
    [
        (5, Watched, "on_metrics returned 5; expected a ctl.Decision"),
        (ctl.Decision(export=["keras"]), Watched, "needs a directory"),
        (ctl.Decision(export=["onnx"], directory="/nowhere"), Watched, "onnx"),
        (ctl.Decision(learning_rate_factor=0.5), Scheduled, "has a schedule"),
    ],
    ids=["no decision", "no directory", "no format", "a schedule"],
)
def test_a_decision_that_cannot_be_carried_out_is_a_sentence(decision, trainer_class, message):
    trainer = trainer_class(
        lambda: [Decides(2, decision)], strategy="default", writers=[], intervals=EVERY_2
    )
    with pytest.raises(ctl.UsageError, match=message):
        trainer.train(4)
