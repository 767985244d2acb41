"""Event files of resumed runs: TensorBoard shows each step once, and no discarded steps."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from conftest import TIMEOUT_SECS
from ctl.metrics.event_files import EventFolder
from ctl.metrics.protocol import Ended, RunEnd, Started, Traced
from ctl.metrics.tensorboard import TensorBoardWriter
from ctl.metrics.tensorboard_log import TensorBoardLog
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard_runs import INFO, accumulated, attempt, files, graph, raw_events, scalar_steps


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "run" / "logs"


def test_a_resumed_run_has_one_event_per_step_in_order(logs):
    attempt(logs, 0, range(1, 9), evals=(2, 4, 6, 8), end=RunEnd.FAILED)
    attempt(logs, 4, range(5, 13), evals=(6, 12))
    assert scalar_steps(logs / "train") == list(range(1, 13))
    assert scalar_steps(logs / "eval") == [2, 4, 6, 12]
    assert [e.step for e in accumulated(logs / "train").Tensors("loss")] == list(range(1, 13))


def test_three_attempts_within_a_second_are_read_in_order(logs):
    for start in (0, 3, 6):
        attempt(logs, start, range(start + 1, start + 6))
    assert scalar_steps(logs / "train") == list(range(1, 12))


def test_a_start_without_a_checkpoint_hides_all_earlier_events(logs):
    attempt(logs, 0, range(1, 9), evals=(4,))
    attempt(logs, 0, [1])
    assert scalar_steps(logs / "train") == [1]
    assert scalar_steps(logs / "eval") == []


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_an_incomplete_last_event_is_skipped(logs, cut):
    writer = TensorBoardWriter(logs)
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0})
    writer.note(Ended(5, RunEnd.DONE))
    (path,) = files(logs / "train")
    path.write_bytes(path.read_bytes()[:-cut])
    attempt(logs, 5, range(6, 8))
    assert scalar_steps(logs / "train") == [1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\xff" * 7, b"\xff" * 50, b"\x08" + b"\0" * 50])
def test_invalid_bytes_at_the_end_are_skipped(logs, tail):
    attempt(logs, 0, range(1, 6))
    path = files(logs / "train")[-1]
    path.write_bytes(path.read_bytes() + tail)
    attempt(logs, 5, [6])
    assert scalar_steps(logs / "train") == [1, 2, 3, 4, 5, 6]


def test_earlier_files_are_not_changed(logs):
    attempt(logs, 0, range(1, 9), facts=replace(INFO, hparams={}))
    before = {path: path.read_bytes() for path in files(logs / "train")}
    attempt(logs, 4, [5])
    assert before.items() <= {path: path.read_bytes() for path in files(logs / "train")}.items()


def test_the_folder_contains_only_event_files(logs):
    attempt(logs, 0, range(1, 9))
    attempt(logs, 4, range(5, 9))
    assert {path.name[:19] for path in (logs / "train").iterdir()} == {"events.out.tfevents"}


def test_a_running_tensorboard_hides_discarded_steps(logs):
    attempt(logs, 0, range(1, 9))
    reader = accumulated(logs / "train")
    attempt(logs, 4, range(5, 7))
    reader.Reload()
    assert [event.step for event in reader.Tensors("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_second_program_keeps_writing_after_a_restart(logs):
    evaluator = TensorBoardLog(logs)
    evaluator.scalars(1000.0, 4, {"loss": 1.0}, "eval")
    evaluator.scalars(1000.0, 8, {"loss": 1.0}, "eval")
    evaluator.flush()
    attempt(logs, 4, [5])
    evaluator.scalars(1000.0, 9, {"loss": 1.0}, "eval")
    evaluator.close()
    assert scalar_steps(logs / "eval") == [4, 9]


def test_a_removed_folder_is_created_again(logs):
    log = TensorBoardLog(logs)
    log.scalars(1000.0, 1, {"loss": 1.0}, "train")
    log.flush()
    log.scalars(1000.0, 2, {"loss": 1.0}, "train")
    for path in files(logs / "train"):
        path.unlink()
    (logs / "train").rmdir()
    log.scalars(1000.0, 3, {"loss": 1.0}, "train")
    log.close()
    assert scalar_steps(logs / "train") == [2, 3]


def test_a_killed_program_leaves_a_folder_that_can_be_resumed(logs):
    program = (
        "import os, sys; from ctl.metrics.tensorboard_log import TensorBoardLog; "
        "log = TensorBoardLog(__import__('pathlib').Path(sys.argv[1])); "
        "[log.scalars(1000.0, step, {'loss': 1.0}, 'train') for step in range(1, 2000)]; "
        "os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(logs)], check=False, timeout=TIMEOUT_SECS)
    last = scalar_steps(logs / "train")[-1]
    assert 100 < last < 1999
    attempt(logs, 100, range(101, 104))
    assert scalar_steps(logs / "train") == list(range(1, 104))


def test_a_file_of_a_clock_that_is_ahead_is_read_first(tmp_path, monkeypatch, caplog):
    now_secs = time.time()
    with monkeypatch.context() as patch:
        patch.setattr("tensorboard.summary.writer.event_file_writer.time.time", lambda: now_secs + 2)
        EventFileWriter(str(tmp_path)).close()
    folder = EventFolder(tmp_path)
    folder.add(1.0, 1)
    folder.close()
    assert raw_events(tmp_path)[-1].step == 1 and len(files(tmp_path)) == 2 and not caplog.text


def test_a_clock_that_is_far_behind_the_newest_file_logs_a_warning(tmp_path, monkeypatch, caplog):
    now_secs = time.time()
    with monkeypatch.context() as patch:
        patch.setattr("tensorboard.summary.writer.event_file_writer.time.time", lambda: now_secs + 3600)
        EventFileWriter(str(tmp_path)).close()
    monkeypatch.setattr("ctl.metrics.event_files._MAX_WAIT_SECS", 0.0)
    folder = EventFolder(tmp_path)
    folder.add(1.0, 1)
    folder.close()
    assert f"TensorBoard logs in {tmp_path}: the clock of this machine is behind" in caplog.text
    assert len(files(tmp_path)) == 2


def test_a_late_graph_drops_no_metrics(logs):
    attempt(logs, 0, [1])
    log = TensorBoardLog(logs)
    log.start(Started(1, None, INFO), 1000.0)
    for step in range(2, 1002):
        log.scalars(1000.0, step, {"loss": 1.0}, "train")
    log.trace(Traced(graph("late")), 1000.0)
    log.scalars(1000.0, 1002, {"loss": 1.0}, "train")
    log.close()
    assert scalar_steps(logs / "train") == list(range(1, 1003))
    assert [node.name for node in accumulated(logs / "train").Graph().node] == ["late"]


def test_the_newest_cards_graph_and_session_are_shown(logs):
    for start in range(4):
        attempt(logs, start, [start + 1], evals=(start + 1,), name=f"node_{start}")
    events = accumulated(logs / "train")
    assert [node.name for node in events.Graph().node] == ["node_3"]
    assert [event.step for event in events.Tensors("configuration")] == [0, 1, 2, 3]
    tags = [value.tag for event in raw_events(logs / "eval") for value in event.summary.value]
    assert tags.count("_hparams_/session_start_info") == tags.count("_hparams_/session_end_info") == 1


def test_a_url_has_the_same_files_as_a_directory(logs):
    url = f"ram://{logs}"
    for attempts_logs in (url, str(logs)):
        attempt(attempts_logs, 0, range(1, 9), evals=(4, 8), end=RunEnd.FAILED)
        attempt(attempts_logs, 4, range(5, 7))
    for run in ("train", "eval"):
        remote, local = (accumulated(f"{directory}/{run}") for directory in (url, logs))
        assert remote.Tags() == local.Tags()
        assert scalar_steps(f"{url}/{run}") == scalar_steps(logs / run)
    assert scalar_steps(f"{url}/train") == [1, 2, 3, 4, 5, 6] and scalar_steps(f"{url}/eval") == [4]
