"""Step and metrics of the best value in the result and the summary of a run."""

import ctl
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.metrics.protocol import Ended
from small_models import Small, every_step

# accuracy has its best value at step 4, loss at step 6; the values of step 8 equal those of step 6
EVALUATIONS = {
    2: {"accuracy": 0.5, "loss": 2.0},
    4: {"accuracy": 0.9, "loss": 1.5},
    6: {"accuracy": 0.7, "loss": 0.0001834},
    8: {"accuracy": 0.7, "loss": 0.0001834},
}


class Planned(Small):
    """A trainer with the evaluations of EVALUATIONS."""

    def eval_step(self, batch):
        steps = tf.constant([*EVALUATIONS], tf.int64)
        row = tf.argmax(tf.cast(steps == tf.cast(self.step_variable, tf.int64), tf.int32))
        factors = tf.ones(tf.shape(batch[0])[0])
        columns = {name: [values[name] for values in EVALUATIONS.values()] for name in EVALUATIONS[2]}
        return {name: factors * tf.gather(tf.constant(column), row) for name, column in columns.items()}


def trained(steps=8, **options):
    writer = ctl.MemoryWriter()
    trainer = Planned(writers=[writer], intervals=every_step(evaluate=ctl.Every(steps=2)), **options)
    result = trainer.train(steps)
    return result, next(event for event in writer.events if isinstance(event, Ended)).summary


def metrics_at(step):
    return {f"eval_{name}": pytest.approx(value) for name, value in EVALUATIONS[step].items()}


CASES = {
    "early stopping": ({"callbacks": lambda: [ctl.EarlyStopping("accuracy", patience=9)]}, 4),
    "smallest": ({"callbacks": lambda: [ctl.EarlyStopping("loss", patience=9)]}, 6),
    "restored": ({"callbacks": lambda: [ctl.EarlyStopping("accuracy", patience=9, restore_best=True)]}, 4),
    "save best": ({"callbacks": lambda: [ctl.SaveBest("accuracy", formats=("weights",))]}, 4),
    "first callback": ({"callbacks": lambda: [
        ctl.EarlyStopping("loss", patience=9), ctl.EarlyStopping("accuracy", patience=9)
    ]}, 6),
    "kept": ({"keep": "1,best=accuracy"}, 4),
    "newest of equal ones": ({"keep": "1,best=loss"}, 8),
    "kept with a mode": ({"keep": "1,best=loss,mode=max"}, 2),
}  # fmt: skip


ON_REPLICAS = [(name, replicas) for name in CASES for replicas in (1, 2)]


@pytest.mark.parametrize(
    "case", some_of(ON_REPLICAS, ("early stopping", 1), ("restored", 1), ("kept", 2)), ids=str
)
def test_the_result_has_the_step_and_the_metrics_of_the_best_value(case, tmp_path, two_replicas):
    name, replicas = case
    options, best_step = CASES[name]
    strategy = two_replicas if replicas == 2 else "default"

    def run(steps):
        arguments = {key: value() if callable(value) else value for key, value in options.items()}
        return trained(steps, model_dir=str(tmp_path), strategy=strategy, **arguments)

    result, summary = run(8)
    assert result.best_step == best_step and result.best_metrics == metrics_at(best_step)
    assert summary["best step"] == str(best_step)
    if "keep" in options:
        assert (tmp_path / f"checkpoints/ckpt-{best_step}").is_dir()
    resumed, _ = run(8)  # no steps left
    assert (resumed.best_step, resumed.best_metrics) == (best_step, metrics_at(best_step))
    assert resumed.end is ctl.RunEnd.NO_STEPS_LEFT


@pytest.mark.parametrize("name", some_of(["early stopping", "save best", "kept"], "kept"))
def test_a_resumed_run_continues_the_comparison(name, tmp_path):
    options, best_step = CASES[name]

    def run(steps):
        arguments = {key: value() if callable(value) else value for key, value in options.items()}
        return trained(steps, model_dir=str(tmp_path), **arguments)[0]

    assert run(4).best_step == best_step == 4
    result = run(8)
    assert result.best_step == 4 and result.best_metrics == metrics_at(4)


def test_a_run_without_a_best_value_has_none():
    result, summary = trained(4)
    assert result.best_step is None and result.best_metrics == {} and result.end is ctl.RunEnd.DONE
    assert "best step" not in summary


def test_the_best_value_of_the_training_has_its_metrics():
    callback = ctl.EarlyStopping("loss", patience=99, run="train")
    result, summary = trained(8, callbacks=[callback])
    assert result.best_step == callback.best_step
    assert result.best_metrics["loss"] == callback.best.value == summary["best train loss"]
    assert not [name for name in result.best_metrics if name.startswith("eval_")]


def test_a_checkpoint_without_the_records_of_the_best_values_resumes(tmp_path):
    callback = ctl.EarlyStopping("accuracy")
    callback.state = {"best": 0.9, "waited": 0, "seen": 2, "stopped_at": None, "best_step": 4}
    assert callback.best.record is None and callback.best.value == 0.9
    saved = ctl.SaveBest("accuracy")
    saved.state = {"best": 0.9}
    assert saved.on_metrics(6, {"accuracy": 0.8}, "eval") is None


def test_small_values_of_the_summary_have_significant_digits(capsys, tmp_path):
    Planned(model_dir=str(tmp_path), keep="1,best=loss", intervals=every_step(evaluate=ctl.Every(steps=2)),
            writers=[ctl.ConsoleWriter(live=False)]).train(8)  # fmt: skip
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["best", "step", "8"] in lines and ["best", "eval", "loss", "0.0001834"] in lines
    assert ["eval", "loss", "0.0001834"] in lines and ["eval", "accuracy", "0.7"] in lines


def test_a_stop_without_any_best_value_names_no_step():
    callback = ctl.EarlyStopping("loss", patience=2)
    decisions = [callback.on_metrics(step, {"loss": float("nan")}, "eval") for step in (1, 2, 3)]
    stops = [decision for decision in decisions if decision is not None and decision.stop]
    assert stops and stops[0].message == "eval loss has not improved for 2 evaluations"


class LastOnly(ctl.MemoryCheckpoints):
    """A manager of the user's own, which names a metric."""

    is_better = ctl.CheckpointManager.is_better
    best_metric = ""

    def __init__(self, metric):
        super().__init__()
        self.best_metric = metric


@pytest.mark.parametrize(
    ("manager", "best_step"),
    [(ctl.MemoryCheckpoints(keep=ctl.Keep(best="accuracy")), 4),
     (ctl.MemoryCheckpoints(keep=ctl.Keep(best="loss")), 8), (LastOnly("accuracy"), 4),
     (LastOnly("loss"), 8)],
)  # fmt: skip
def test_managers_without_files_compare_evaluations_too(manager, best_step):
    result, _ = trained(8, checkpoints=manager)
    assert result.best_step == best_step and result.best_metrics == metrics_at(best_step)
