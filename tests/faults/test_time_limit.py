"""Runs that end at their time limit and continue with the same command."""

import json
import time

import ctl
import pytest
import tensorflow as tf
from small_models import Small
from training import STEPS, assert_bit_identical, run, saved, trace

pytestmark = pytest.mark.workers


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_ends_at_its_time_limit_has_exit_code_0_and_continues_exactly(
    workers, tmp_path, unbroken
):
    model_dir = tmp_path / "run"
    result = run(model_dir, "--max_secs=2", "--export=keras", workers=workers, PAUSE_SECS="0.5")
    assert result.code == 0, result.output[-2000:]
    last_step = max(trace(model_dir))
    assert f"stopped by the time limit at step {last_step}" in result.output
    assert 0 < last_step < STEPS and saved(model_dir)[-1] == last_step
    assert not (model_dir / "export").exists()
    assert json.loads((model_dir / "LOCK").read_text())["reason"] == "stopped by the time limit"
    assert run(model_dir, "--max_secs=600", workers=workers).code == 0
    assert_bit_identical(model_dir, unbroken(workers))


def test_a_run_that_ends_before_its_time_limit_is_exported(tmp_path):
    result = run(tmp_path / "run", "--max_secs=600", "--export=keras")
    assert result.code == 0 and f"done at step {STEPS}" in result.output
    assert (tmp_path / "run" / "export").exists()


def test_a_time_limit_without_a_directory_for_checkpoints_is_warned_of(caplog):
    Small(max_secs=600.0, writers=[]).train(1)
    assert "max_secs is 600, without a model_dir" in caplog.text


class Slow(Small):
    """A step of at least 0.1 s."""

    def train_step(self, batch):
        tf.py_function(lambda: time.sleep(0.1), [], [])
        return super().train_step(batch)


class Written(ctl.MetricWriter):
    """Records the metrics."""

    def __init__(self):
        self.calls = []

    def write(self, step, values, run="train"):
        self.calls.append((step, run, values))


def test_a_run_that_ends_at_its_time_limit_logs_the_means_since_the_last_log_and_does_not_evaluate():
    written, intervals = Written(), ctl.Intervals(evaluate=ctl.Every(steps=1000))
    trainer = Slow(max_secs=0.3, steps_per_loop=1, intervals=intervals, writers=[written])
    result = trainer.train(1000)
    assert result.end is ctl.RunEnd.TIME_LIMIT
    assert [(step, run) for step, run, _ in written.calls] == [(trainer.step, "train")]
    assert written.calls[0][2]["loss"] == result["loss"] > 0.0
