"""Metric writers on a full disk: lines of metrics.jsonl and events of TensorBoard are written later."""

import errno
import json
import logging

import pytest
import small_disks
from ctl.metrics.event_files import EventFolder
from ctl.metrics.jsonl import JsonlWriter
from ctl.metrics.protocol import Ended, RunEnd, RunInfo, Started
from ctl.metrics.tensorboard import TensorBoardWriter
from polling import wait_until
from tensorboard_runs import raw_events, scalar_steps

INFO = RunInfo("M", "one_device", 1, 1, 8, "", "float32", 0, None)


@pytest.fixture
def small_disk(tmp_path):
    with small_disks.mounted(tmp_path / "disk", "1m") as directory:
        yield directory


def test_metrics_jsonl_has_every_line_when_the_disk_has_space_again(small_disk, caplog):
    caplog.set_level(logging.WARNING, "ctl")
    path = small_disk / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.note(Started(0, None, INFO))
    writer.write(1, {"loss": 1.0})
    small_disks.fill(small_disk / "filler")
    for step in range(2, 200):  # exceeds the allocated page of the file
        writer.write(step, {"loss": 1.0, "x" * 100: 2.0})
    [warning] = caplog.messages
    assert "cannot be written for now (No space left on device)" in warning
    (small_disk / "filler").unlink()
    writer.write(200, {"loss": 1.0})
    writer.note(Ended(200, RunEnd.DONE))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 201))
    assert "is written again; 0 lines were dropped" in caplog.messages[-1]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_has_every_event_when_the_disk_has_space_again(small_disk, caplog):
    caplog.set_level(logging.WARNING, "ctl")
    writer = TensorBoardWriter(small_disk / "logs", flush_every_secs=0.02)
    writer.note(Started(0, None, INFO))
    writer.write(1, {"loss": 1.0})
    wait_until(lambda: scalar_steps(small_disk / "logs" / "train") == [1])
    small_disks.fill(small_disk / "filler")
    for step in range(2, 400):
        writer.write(step, {"loss": 1.0, "x" * 100: 2.0})
    wait_until(lambda: "cannot be written for now" in caplog.text, show=lambda: caplog.text)
    writer.write(400, {"loss": 1.0})
    (small_disk / "filler").unlink()
    wait_until(lambda: "are written again; 0 entries were dropped" in caplog.text, show=lambda: caplog.text)
    writer.note(Ended(400, RunEnd.DONE))
    assert scalar_steps(small_disk / "logs" / "train") == list(range(1, 401))
    assert len(list((small_disk / "logs" / "train").iterdir())) == 2


def test_a_disk_that_stays_full_loses_the_newest_entries_with_a_warning(small_disk, caplog):
    writer = TensorBoardWriter(small_disk / "logs", close_timeout_secs=0.2)
    for step in range(1, 4):
        writer.write(step, {"loss": 1.0})
        writer.note(Ended(step, RunEnd.DONE))
        if step == 1:
            small_disks.fill(small_disk / "filler")
    first, *later = caplog.messages
    assert "No space left on device" in first and str(small_disk / "logs") in first
    assert later and all("entries are lost" in message for message in later)
    assert scalar_steps(small_disk / "logs" / "train") == [1]


def test_an_error_of_the_last_event_is_detected(tmp_path, monkeypatch):
    """The file lacks bytes because the file system has ignored an error."""
    folder = EventFolder(tmp_path)
    folder.add(1.0, 1)
    folder.flush()
    with monkeypatch.context() as patch:
        patch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", lambda *_: None)
        folder.add(1.0, 2)
        with pytest.raises(OSError, match="bytes after a write"):
            folder.flush()
    folder.close()
    assert [event.step for event in raw_events(tmp_path) if not event.file_version] == [1, 2]


def test_pending_events_are_written_again_if_the_file_is_lost_with_an_error(tmp_path, monkeypatch):
    folder = EventFolder(tmp_path)
    folder.add(1.0, 1)
    folder.flush()
    folder.add(1.0, 2)

    def lose(*arguments):
        for path in folder.files():
            path.unlink()
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", lose)
        with pytest.raises(OSError, match="Stale file handle"):
            folder.flush()
    folder.close()
    assert [event.step for event in raw_events(tmp_path) if not event.file_version] == [2]


def test_lines_that_a_full_disk_never_takes_are_lost_with_a_warning(small_disk, caplog, monkeypatch):
    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    writer = JsonlWriter(small_disk / "metrics.jsonl")
    small_disks.fill(small_disk / "filler")
    for step in range(1, 4):
        writer.write(step, {"loss": 1.0})
    writer.note(Ended(3, RunEnd.DONE))
    assert "3 lines are lost, because the disk still fails" in caplog.messages[-1]
    (small_disk / "filler").unlink()
    writer.write(4, {"loss": 1.0})
    assert '"step": 4' in (small_disk / "metrics.jsonl").read_text()


def test_dropped_lines_are_logged(small_disk, caplog, monkeypatch):
    monkeypatch.setattr("ctl.metrics.jsonl.MAX_PENDING", 50)
    path = small_disk / "metrics.jsonl"
    writer = JsonlWriter(path)
    small_disks.fill(small_disk / "filler")
    for step in range(80):
        writer.write(step, {"loss": 1.0})
    (small_disk / "filler").unlink()
    writer.write(80, {"loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(31, 81))
    assert "is written again; 31 lines were dropped" in caplog.text


def test_a_deleted_file_is_created_again_with_a_warning(tmp_path, caplog):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"loss": 1.0})
    path.unlink()
    path.parent.rmdir()
    writer.write(2, {"loss": 1.0})
    assert json.loads(path.read_text())["step"] == 2
    assert "was deleted: its lines are lost" in caplog.text
