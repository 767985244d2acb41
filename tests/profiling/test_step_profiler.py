"""`ctl profile` during training: a table of the step timers, without changes of the training."""

import json
import time

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.metrics.protocol import SharesLogged, TextLogged
from ctl.profiling import profile_report, step_profiler
from ctl.profiling.step_profiler import TimerWindow
from small_models import BATCH, Small, every_step, examples, losses, traced_steps


@pytest.fixture
def short_measurement(monkeypatch):
    """Measures two graph calls of any length."""
    monkeypatch.setattr(step_profiler, "_MIN_LOOPS", 2)
    monkeypatch.setattr(step_profiler, "_MIN_SECS", 0.0)


class Noisy(Small):
    """A model with random numbers in the step, and with a variable inside a list."""

    def build(self):
        super().build()
        self.seen = tf.Variable(0.0, trainable=False)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self._hidden = [tf.Variable(0.0, trainable=False, aggregation=first)]

    def train_step(self, batch):
        x, y = batch
        self._hidden[0].assign_add(1.0)
        x += tf.random.normal(tf.shape(x), stddev=0.1) + 1e-3 * self._hidden[0]
        return super().train_step((x, y))


class Unknown(Noisy):
    """Data of unknown length: 20 batches."""

    def train_data(self, batch_size):
        x, y = examples()
        rows = tf.data.Dataset.from_tensor_slices((np.tile(x, [5, 1]), np.tile(y, 5)))
        return rows.filter(lambda *_: True).batch(batch_size)


def run_training(trainer_class, strategy, steps=12, **options):
    writer, saves = ctl.MemoryWriter(), options.pop("checkpoints", None) or ctl.MemoryCheckpoints()
    options = {"optimizer": "adam", "dropout": 0.3, "intervals": every_step(), **options}
    trainer = trainer_class(strategy=strategy, writers=[writer], checkpoints=saves, **options)
    trainer.train(steps)
    state = {n: v.numpy() for n, v in trainer._prepared_trainer.state.variables.items()}
    return trainer, state, losses(writer)


CASES = {  # name -> (trainer class, number of replicas, options)
    "a saved iterator": (Noisy, 1, {"tf_data": True, "data_position": "iterator",
                                    "intervals": every_step(steps_per_loop=1)}),
    "replicas, unknown length": (Unknown, 2, {"steps": 100, "dropout": 0.0}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", some_of(CASES, *CASES.keys() - {"a saved iterator"}))
def test_a_profiled_training_has_the_bits_of_an_unprofiled_one(
    short_measurement, monkeypatch, capsys, two_replicas, case
):
    trainer_class, replicas, options = CASES[case]
    strategy = two_replicas if replicas == 2 else "default"
    unprofiled, state_before, expected = run_training(trainer_class, strategy, **options)
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    trainer, state_after, actual = run_training(trainer_class, strategy, **options)
    assert trainer._prepared_trainer.activity.has_profiled and "ms a step" in capsys.readouterr().out
    assert actual == expected and len(actual) == trainer.step == (20 if trainer_class is Unknown else 12)
    for name, value in state_before.items():
        if name == "data_iterator/data_iterator":  # contains prefetched data, which differ between runs
            continue
        assert np.array_equal(value, state_after[name]), name
    assert (
        trainer._hidden[0].numpy() == unprofiled._hidden[0].numpy() == trainer.step
    )  # the variable in a list


def run_profiled(monkeypatch, tmp_path, trainer_class, strategy, **options):
    path = tmp_path / "profile.json"
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, str(path))
    trainer, *_ = run_training(trainer_class, strategy, **options)
    profile = json.loads(path.read_text())
    (shares_event,) = [e for e in trainer._writers[0].events if isinstance(e, SharesLogged)]
    assert shares_event.step == profile["step"] and shares_event.shares.keys() == profile["parts"].keys()
    assert sum(shares_event.shares.values()) == pytest.approx(1.0)
    (text,) = [e.text for e in trainer._writers[0].events if isinstance(e, TextLogged)]
    assert "ms a step" in text
    return profile


def test_a_slow_source_is_not_reported_as_arrays(short_measurement, monkeypatch, capsys, tmp_path):
    class SlowSource(Small):
        def train_data(self, batch_size):
            def read(example):
                time.sleep(0.01)
                return example

            pairs = list(zip(*examples(), strict=True))
            return ctl.from_source(pairs, batch_size, transform=read, num_threads=1)

    run_profiled(monkeypatch, tmp_path, SlowSource, "default", steps=6, dropout=0.0)
    report = capsys.readouterr().out
    assert "Waiting for input is" in report and "arrays in memory" not in report


def test_slow_input_is_measured_and_a_save_does_not_count_as_host(short_measurement, monkeypatch, tmp_path):
    class SlowInput(Small):
        def train_data(self, batch_size):
            def sleep_and_return(x, y):
                return tf.numpy_function(lambda a: time.sleep(0.3) or a, [x], tf.float32), y

            data = tf.data.Dataset.from_tensor_slices(examples()).repeat().batch(batch_size, True)
            data = data.map(sleep_and_return).map(lambda x, y: (tf.ensure_shape(x, [BATCH, 8]), y))
            return data.prefetch(1)

    class SlowSaves(ctl.MemoryCheckpoints):
        def save(self, *arguments):
            time.sleep(0.6)
            return super().save(*arguments)

    monkeypatch.setattr(step_profiler, "_MIN_LOOPS", 6)
    options = {"checkpoints": SlowSaves(), "intervals": every_step(save=ctl.Every(steps=4))}
    profile = run_profiled(monkeypatch, tmp_path, SlowInput, "default", **options)
    parts = profile["parts"]
    assert parts["waiting for input"] > parts["computing"]
    assert parts["host"] < 0.5 * parts["saving"] and parts["saving"] == profile["one_save"] / 4


def test_two_replicas_have_a_time_for_communication(short_measurement, monkeypatch, tmp_path, two_replicas):
    profile = run_profiled(
        monkeypatch, tmp_path, Small, two_replicas, intervals=every_step(steps_per_loop=1)
    )
    (times,) = profile["times"]
    assert profile["parts"]["communicating"] == times["communication"] > 0
    assert (profile["replicas"], profile["workers"], profile["steps_per_loop"]) == (2, 1, 1)
    assert not profile["can_send_16_bits"], "there is no network between replicas of one process"


@pytest.mark.parametrize("steps", some_of([100, 6], 6))
def test_the_steps_after_the_measurement_are_traced_for_tensorboard(
    short_measurement, monkeypatch, capsys, tmp_path, steps
):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    trainer = Small(strategy="default", model_dir=str(tmp_path / "run"), intervals=every_step())
    trainer.train(steps)
    (trace,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert trace.parent == tmp_path / "run/logs/train/plugins/profile/steps_4-9"
    assert traced_steps(trace) == set(range(5, min(steps, 9) + 1))
    assert f"trace of the next 5 steps: {trace.parent}\n" in capsys.readouterr().out


def test_a_report_at_the_last_step_has_no_trace(short_measurement, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    options = {"model_dir": str(tmp_path / "run"), "intervals": every_step()}
    Small(strategy="default", **options).train(4)
    output = capsys.readouterr().out
    assert "Small at step 4;" in output and "trace of" not in output
    assert not list((tmp_path / "run").rglob("*.xplane.pb"))


def test_a_trace_that_was_requested_is_the_only_one(short_measurement, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    options = {"model_dir": str(tmp_path / "run"), "intervals": every_step(), "profile": "8:9"}
    Small(strategy="default", **options).train(12)
    (trace,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert trace.parent.name == "steps_8-9" and "trace of" not in capsys.readouterr().out


def test_a_trainer_reports_once(short_measurement, monkeypatch, capsys):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    trainer = Small(strategy="default", writers=[], intervals=every_step())
    trainer.train(8)
    trainer.train(16)
    assert capsys.readouterr().out.count("ctl profile:") == 1


class Clock:
    """Clock, graph calls and waits of a simulated training."""

    def __init__(self):
        self.time_secs, self.waits = 0.0, np.array([100.0, 200.0])  # the totals before the window
        self.window = TimerWindow(self.waits.copy)

    def run(self, steps, secs, host_secs=0.0):
        """Adds a graph call of `secs` seconds per step: 20 % are communication and 10 % are input."""
        start = self.time_secs + host_secs
        self.time_secs = start + steps * secs
        self.waits += [0.2 * steps * secs, 0.1 * steps * secs]
        self.window.add(steps, start, self.time_secs)


def test_averages_are_those_of_the_graph_calls_in_the_window(monkeypatch):
    monkeypatch.setattr(step_profiler, "_MIN_SECS", 4.0)
    clock = Clock()
    clock.run(1, 5.0)  # a longer call follows
    clock.run(10, 9.0)  # the window starts at its end
    for _ in range(4):
        assert not clock.window.is_long_enough
        clock.run(10, 0.1, host_secs=0.5)
    clock.window.pause()  # for a save
    clock.run(6, 0.1, host_secs=99.0)
    assert clock.window.is_long_enough and clock.window.longest == 10
    np.testing.assert_allclose(clock.window.averages(), [0.1, 2.0 / 40, 0.02, 0.01])


def test_a_call_that_is_not_timed_restarts_the_window(monkeypatch):
    monkeypatch.setattr(step_profiler, "_MIN_LOOPS", 1)
    monkeypatch.setattr(step_profiler, "_MIN_SECS", 0.0)
    clock = Clock()
    clock.run(10, 7.0)
    clock.run(10, 7.0)
    assert clock.window.is_long_enough
    clock.window.restart()  # the step was traced again
    clock.waits += 50.0
    assert not clock.window.is_long_enough
    clock.run(10, 7.0)
    clock.run(10, 0.1, host_secs=0.1)
    np.testing.assert_allclose(clock.window.averages(), [0.1, 0.01, 0.02, 0.01])


def test_a_run_that_is_too_short_is_reported(monkeypatch, caplog):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    run_training(Small, "default", steps=3)
    assert "ended before there was enough to measure" in caplog.text


def test_without_ctl_profile_no_table_is_printed(short_measurement, capsys):
    run_training(Small, "default")
    assert "ctl profile" not in capsys.readouterr().out
