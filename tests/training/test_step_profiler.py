"""`ctl profile` in a training: the numbers add up, and the training is that of a run without it."""

import json
import time

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.metrics.protocol import SharesLogged, TextLogged
from ctl.step import sum_free
from ctl.training import loop_length, profile_report, step_profiler
from small_models import BATCH, Small, every_step, examples, losses, traced_steps


@pytest.fixture
def quick(monkeypatch):
    """Few loops and short calls are enough."""
    monkeypatch.setattr(loop_length, "_LEAST_LOOPS", 2)
    monkeypatch.setattr(loop_length, "_LEAST_SECS", 0.0)
    monkeypatch.setattr(step_profiler, "_CALL_SECS", 0.02)
    monkeypatch.setattr(step_profiler, "_ROUNDS", 1)


class Noisy(Small):
    """Random numbers of every kind, a variable that no attribute owns, and metrics."""

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


def trained(kind, strategy, steps=12, **options):
    writer, saves = ctl.MemoryWriter(), options.pop("checkpoints", None) or ctl.MemoryCheckpoints()
    options = {"optimizer": "adam", "dropout": 0.3, "intervals": every_step(), **options}
    trainer = kind(strategy=strategy, writers=[writer], checkpoints=saves, **options)
    trainer.train(steps)
    state = {n: v.numpy() for n, v in trainer._session.state.variables.items()}
    return trainer, state, losses(writer)


CASES = {  # kind, number of replicas, options
    "a saved iterator": (Noisy, 1, {"tf_data": True, "data_position": "iterator",
                                    "intervals": every_step(steps_per_loop=1)}),
    "replicas, unknown length": (Unknown, 2, {"steps": 100, "dropout": 0.0}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", some_of(CASES, *CASES.keys() - {"a saved iterator"}))
def test_the_training_is_that_of_a_run_without_it_to_the_last_bit(
    quick, monkeypatch, capsys, two_replicas, case
):
    kind, replicas, options = CASES[case]
    strategy = two_replicas if replicas == 2 else "default"
    plain, before, expected = trained(kind, strategy, **options)
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    trainer, after, got = trained(kind, strategy, **options)
    assert trainer._session.profiled and "ms a step" in capsys.readouterr().out
    assert got == expected and len(got) == trainer.step == (20 if kind is Unknown else 12)
    for name, value in before.items():
        if name == "data_iterator/data_iterator":  # with what is prefetched, which differs from run to run
            continue
        assert np.array_equal(value, after[name]), name
    assert trainer._hidden[0].numpy() == plain._hidden[0].numpy() == trainer.step  # no attribute owns it


def measured(monkeypatch, tmp_path, kind, strategy, **options):
    path = tmp_path / "profile.json"
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, str(path))
    trainer, *_ = trained(kind, strategy, **options)
    found = json.loads(path.read_text())
    (shown,) = [e for e in trainer._writers[0].events if isinstance(e, SharesLogged)]
    assert shown.step == found["step"] and shown.shares.keys() == found["parts"].keys()
    assert sum(shown.shares.values()) == pytest.approx(1.0)
    (text,) = [e.text for e in trainer._writers[0].events if isinstance(e, TextLogged)]
    assert "ms a step" in text
    return found


def test_slow_input_is_found_and_a_save_is_not_the_host_s(quick, monkeypatch, tmp_path):
    class Slow(Small):
        def train_data(self, batch_size):
            def slowly(x, y):
                return tf.numpy_function(lambda a: time.sleep(0.1) or a, [x], tf.float32), y

            data = tf.data.Dataset.from_tensor_slices(examples()).repeat().batch(batch_size, True)
            data = data.map(slowly).map(lambda x, y: (tf.ensure_shape(x, [BATCH, 8]), y))
            return data.prefetch(1)

    class SlowSaves(ctl.MemoryCheckpoints):
        def save(self, *what):
            time.sleep(0.6)
            return super().save(*what)

    monkeypatch.setattr(loop_length, "_LEAST_LOOPS", 6)
    options = {"checkpoints": SlowSaves(), "intervals": every_step(save=ctl.Every(steps=4))}
    found = measured(monkeypatch, tmp_path, Slow, "default", **options)
    parts = found["parts"]
    assert parts["waiting for input"] > parts["computing"]
    assert parts["host"] < 0.5 * parts["saving"] and parts["saving"] == found["one_save"] / 4


@pytest.mark.parametrize("steps", [100, 6])
def test_the_steps_after_the_measurement_are_traced_for_tensorboard(
    quick, monkeypatch, capsys, tmp_path, steps
):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    trainer = Small(strategy="default", model_dir=str(tmp_path / "run"), intervals=every_step())
    trainer.train(steps)
    (found,) = (tmp_path / "run").rglob("*.xplane.pb")
    measured = max(s for s in range(steps) if f"{s + 1}-{s + 6}" in str(found))
    assert found.parent == tmp_path / f"run/logs/train/plugins/profile/steps_{measured + 1}-{measured + 6}"
    assert traced_steps(found) == set(range(measured + 2, min(steps, measured + 6) + 1))
    assert f"trace of the next 5 steps: {found.parent}\n" in capsys.readouterr().out


def test_a_trace_that_was_asked_for_is_the_only_one(quick, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    options = {"model_dir": str(tmp_path / "run"), "intervals": every_step(), "profile": "8:9"}
    Small(strategy="default", **options).train(12)
    (found,) = (tmp_path / "run").rglob("*.xplane.pb")
    assert found.parent.name == "steps_8-9" and "trace of" not in capsys.readouterr().out


def test_what_python_does_between_calls_is_host_but_for_saves(monkeypatch):
    monkeypatch.setattr(loop_length, "_LEAST_SECS", 5.0)
    times, now = loop_length.LoopTimes(), 0.0
    for steps, secs, between in [(1, 5.0, 9.0), *[(10, 1.0, 0.5)] * 4, (6, 0.6, 99.0), (10, 1.0, 0.5)]:
        assert times.typical() is None
        if between == 99.0:
            times.pause()  # it was a save
        times.took(steps, now + between, now := now + between + secs)
    assert times.typical() == pytest.approx((0.1, 2.5 / 50)) and times.longest == 10


def test_sums_are_found_by_leaving_them_out(two_replicas):
    def step():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.constant(2.0))

    def traced():
        return [float(v) for v in tf.function(lambda: two_replicas.run(step))().values]

    with sum_free.without_sums(first=0) as sums:
        assert traced() == [2.0, 2.0]
    assert [(s.shape, s.dtype) for s in sum_free.of_last_trace(sums)] == [([], tf.float32)]
    assert traced() == [4.0, 4.0]


def test_a_run_that_is_too_short_says_so(monkeypatch, caplog):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)
    trained(Small, "default", steps=3)
    assert "ended before there was enough to measure" in caplog.text


def test_a_step_that_cannot_be_measured_costs_nothing(quick, monkeypatch, caplog):
    monkeypatch.setenv(profile_report.PROFILE_VARIABLE, profile_report.NO_PATH)

    def fails(*_):
        raise tf.errors.InternalError(None, None, "no")

    monkeypatch.setattr(step_profiler.Variants, "seconds", fails)
    assert trained(Small, "default")[0].step == 12
    assert "cannot measure this step" in caplog.text
