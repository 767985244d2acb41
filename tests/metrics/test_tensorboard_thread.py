"""The thread that writes event files. It must not fail, delay or outlive the training."""

import errno
import logging
import re
import subprocess
import sys
import threading

import pytest
from conftest import TIMEOUT_SECS
from ctl.metrics.protocol import Ended, Progressed, RunEnd, RunInfo, Saved, Started
from ctl.metrics.tensorboard import TensorBoardWriter
from ctl.metrics.tensorboard_log import TensorBoardLog
from polling import wait_until
from tensorboard_runs import scalar_steps

EARLIER_THREADS: list[threading.Thread] = []
INFO = RunInfo("Mnist", "mirrored", 1, 2, 64, "1,000 examples", "float32", 7, None)


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "run" / "logs"


@pytest.fixture
def warnings_logged(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if "TensorBoard" in r.getMessage()]


def writing_threads():
    """Returns the threads of writers, without those of other tests, which may end at any time."""
    return [t for t in threading.enumerate() if t.name == "ctl-tensorboard" and t not in EARLIER_THREADS]


@pytest.fixture(autouse=True)
def exclude_earlier_threads():
    EARLIER_THREADS[:] = threading.enumerate()


def test_progress_starts_no_thread(logs):
    TensorBoardWriter(logs).note(Progressed(1))
    assert not writing_threads()
    assert not logs.exists()


def test_a_folder_that_cannot_be_written_is_one_warning_and_no_error(tmp_path, warnings_logged):
    (tmp_path / "file").write_text("")
    writer = TensorBoardWriter(tmp_path / "file" / "logs")
    for start in (0, 50):
        writer.note(Started(start, None, INFO))
        for step in range(start, start + 50):
            writer.write(step, {"loss": 1.0})
        writer.note(Ended(start + 50, RunEnd.DONE))
    (message,) = warnings_logged()
    assert "file/logs" in message and "NotADirectoryError" in message


def test_a_full_queue_drops_with_one_warning_and_never_waits(logs, warnings_logged, monkeypatch):
    gate = threading.Event()
    original_scalars = TensorBoardLog.scalars

    def blocked_scalars(self, *args):
        assert gate.wait(TIMEOUT_SECS)
        original_scalars(self, *args)

    monkeypatch.setattr(TensorBoardLog, "scalars", blocked_scalars)
    writer = TensorBoardWriter(logs, queue_size=5)
    for step in range(100):
        writer.write(step, {"loss": 1.0})
    assert len(warnings_logged()) == 1 and "dropped" in warnings_logged()[0]
    gate.set()
    writer.note(Ended(100, RunEnd.DONE))
    assert 5 <= len(scalar_steps(logs / "train")) <= 6


def test_a_disk_that_hangs_delays_the_end_for_a_bounded_time(logs, warnings_logged, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(TensorBoardLog, "scalars", lambda self, *args: gate.wait(TIMEOUT_SECS))
    writer = TensorBoardWriter(logs, close_timeout_secs=0.05)
    writer.write(1, {"loss": 1.0})
    writer.note(Ended(1, RunEnd.DONE))
    gate.set()
    assert ["not completely written" in message for message in warnings_logged()] == [True]


def test_a_full_queue_of_a_disk_that_hangs_delays_the_end_for_a_bounded_time(
    logs, warnings_logged, monkeypatch
):
    gate = threading.Event()
    monkeypatch.setattr(TensorBoardLog, "scalars", lambda self, *args: gate.wait(TIMEOUT_SECS))
    writer = TensorBoardWriter(logs, queue_size=1, close_timeout_secs=0.05)
    for step in range(5):
        writer.write(step, {"loss": 1.0})
    writer.note(Ended(5, RunEnd.DONE))
    gate.set()
    assert "not completely written after 0.05 s" in warnings_logged()[-1]


def test_entries_beyond_the_queue_are_dropped_while_writes_fail(logs, warnings_logged, monkeypatch):
    scalars, is_failing = TensorBoardLog.scalars, threading.Event()
    is_failing.set()

    def failing(self, *args):
        if is_failing.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        scalars(self, *args)

    monkeypatch.setattr(TensorBoardLog, "scalars", failing)
    writer = TensorBoardWriter(logs, queue_size=4, flush_every_secs=0.02)
    for step in range(10):
        writer.write(step, {"loss": 1.0})
        wait_until(writer._queue.empty)
    is_failing.clear()
    wait_until(lambda: "written again" in warnings_logged()[-1], show=warnings_logged)
    writer.note(Ended(10, RunEnd.DONE))
    dropped = int(re.search(r"(\d+) entries were dropped", warnings_logged()[1])[1])
    assert 5 <= dropped <= 6 and scalar_steps(logs / "train") == list(range(10 - dropped))


def test_no_event_is_dropped_normally(logs, warnings_logged):
    writer = TensorBoardWriter(logs)
    for step in range(3000):
        writer.write(step, {"loss": 1.0})
    writer.note(Ended(3000, RunEnd.DONE))
    assert scalar_steps(logs / "train") == list(range(3000))
    assert not warnings_logged()


def test_metrics_are_flushed_before_the_end(logs, monkeypatch):
    flushed = threading.Event()
    original_flush = TensorBoardLog.flush

    def flush_and_check(self):
        original_flush(self)
        if (logs / "train").exists() and 2 in scalar_steps(logs / "train"):
            flushed.set()

    monkeypatch.setattr(TensorBoardLog, "flush", flush_and_check)
    writer = TensorBoardWriter(logs, flush_every_secs=0.01)
    writer.write(1, {"loss": 1.0})
    writer.write(2, {"loss": 1.0})
    assert flushed.wait(TIMEOUT_SECS)
    writer.note(Ended(2, RunEnd.DONE))


def test_numbers_before_a_checkpoint_are_on_disk_with_it(logs):
    """A killed run resumes from the checkpoint and does not write these metrics again."""
    writer = TensorBoardWriter(logs, flush_every_secs=1000.0)
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0})
    writer.note(Saved(5, "ckpt-5"))
    wait_until(lambda: scalar_steps(logs / "train") == [1, 2, 3, 4, 5])
    writer.note(Ended(5, RunEnd.DONE))


def test_one_thread_per_writer_ends_with_the_run(logs):
    writer = TensorBoardWriter(logs)
    for step in range(10):
        writer.write(step, {"loss": 1.0})
    assert len(writing_threads()) == 1
    writer.note(Ended(10, RunEnd.DONE))
    assert not writing_threads()


def test_metrics_without_an_end_are_written_when_the_program_exits(logs):
    program = (
        "import sys; from ctl.metrics.tensorboard import TensorBoardWriter as T; "
        "from ctl.metrics.protocol import Ended, RunEnd; r = T(sys.argv[1]); r.write(1, {'loss': 1.0}); "
        "r.note(Ended(1, RunEnd.DONE)); r.write(2, {'loss': 1.0})"
    )
    subprocess.run([sys.executable, "-c", program, str(logs)], check=True, timeout=TIMEOUT_SECS)
    assert scalar_steps(logs / "train") == [1, 2]


def test_a_program_without_tensorflow_writes_its_metrics_and_ends_normally(logs):
    program = (
        "import sys, ctl; writer = ctl.TensorBoardWriter(sys.argv[1]); "
        "writer.write(1, {'loss': 1.0}, 'train'); writer.write(2, {'loss': 2.0}, 'train')"
    )
    subprocess.run([sys.executable, "-c", program, str(logs)], check=True, timeout=TIMEOUT_SECS)
    assert scalar_steps(logs / "train") == [1, 2]


def test_a_value_that_is_no_number_is_the_callers_error(logs):
    with pytest.raises((TypeError, ValueError)):
        TensorBoardWriter(logs).write(1, {"loss": "high"})
