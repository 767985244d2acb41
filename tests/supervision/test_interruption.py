"""Signals and the time limit of a run."""

import os
import signal
import subprocess
import sys

import ctl
import pytest
import tensorflow as tf
from ctl.supervision.signals import TIME_LIMIT, Interruption
from small_models import Small

TWO_SIGNALS = """
import os, signal, sys
from ctl.supervision.signals import Interruption
with Interruption() as interruption:
    interruption.apply_votes([float(v) for v in sys.argv[2:]])
    for number in sys.argv[1].split(","):
        os.kill(os.getpid(), getattr(signal, number))
    print("alive", interruption.received, flush=True)
"""


def test_the_time_limit_counts_from_the_creation_and_a_signal_before_it_has_priority():
    assert Interruption().received is None
    assert Interruption(max_secs=600.0).received is None
    expired = Interruption(max_secs=1e-9)
    assert expired.received == TIME_LIMIT and expired.votes() == [0.0, 0.0, 1.0]
    with expired:
        os.kill(os.getpid(), signal.SIGTERM)
        assert expired.received == signal.SIGTERM and expired.votes() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("votes", "received"),
    [([0, 0, 0], None), ([0, 0, 1], TIME_LIMIT), ([0, 1, 1], signal.SIGINT), ([1, 1, 2], signal.SIGTERM)],
)
def test_workers_agree_on_one_cause(votes, received):
    interruption = Interruption()
    assert interruption.apply_votes(votes) == (received is not None)
    assert interruption.received == received


@pytest.mark.parametrize(
    ("numbers", "votes", "code"),
    [
        ("SIGTERM", "0 0 1", 0),  # during the last save of a run that has reached its time limit
        ("SIGTERM", "1 0 0", 0),  # another worker has received it first
        ("SIGTERM,SIGTERM", "0 0 1", 143),
        ("SIGINT,SIGINT", "0 0 0", 130),
        ("SIGTERM,SIGHUP", "0 0 0", 0),  # a closed terminal is never the second signal
        ("SIGHUP,SIGTERM", "0 0 0", 143),
    ],
)
def test_only_the_second_signal_to_a_process_ends_it(numbers, votes, code):
    command = [sys.executable, "-c", TWO_SIGNALS, numbers, *votes.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    assert ("alive" in result.stdout) == (code == 0)


def test_a_pending_evaluation_is_completed_whatever_the_time_limit():
    interruption = Interruption(max_secs=1e-9)
    with interruption.without_time_limit():
        assert interruption.received is None
        interruption._handle(signal.SIGTERM, None)
        assert interruption.received == signal.SIGTERM
    assert Interruption(max_secs=1e-9).received == TIME_LIMIT


class Endless(Small):
    """A run with an evaluation that is longer than the time limit."""

    def eval_data(self, batch_size):
        data = tf.data.Dataset.from_tensors(tf.zeros([batch_size, 8]))
        return data.repeat(10**9) if self.is_endless else data

    def eval_step(self, batch):
        return {"zero": tf.zeros([tf.shape(batch)[0]])}


def test_the_time_limit_ends_an_evaluation_which_the_next_run_repeats(tmp_path):
    intervals = ctl.Intervals(evaluate=ctl.Every(steps=2))
    for max_secs in (2.0, 10.0, 60.0):  # a busy machine may need all of a limit for the first steps
        directory = str(tmp_path / str(max_secs))
        trainer = Endless(model_dir=directory, max_secs=max_secs, intervals=intervals, writers=[])
        trainer.is_endless = True
        result = trainer.train(4)
        if trainer.step == 2:
            break
    assert result.end is ctl.RunEnd.TIME_LIMIT and trainer.step == 2
    long = Endless(model_dir=directory, max_secs=0.001, intervals=intervals, writers=[])
    long.is_endless = False
    assert long.train(4).end is ctl.RunEnd.TIME_LIMIT and long.step > 2, "it makes progress"
    resumed = Endless(model_dir=directory, intervals=intervals, writers=[])
    resumed.is_endless = False
    result = resumed.train(4)
    assert result.end in (ctl.RunEnd.DONE, ctl.RunEnd.NO_STEPS_LEFT) and result["eval_zero"] == 0.0
