"""Resuming after a checkpoint: no step twice, none backwards, nothing that piles up."""

import logging
import subprocess
import sys

import pytest
from ctl.metrics.event_files import EventFolder, read_records
from ctl.metrics.protocol import Ended, RunEnd, Started, Traced
from ctl.metrics.tensorboard import TensorBoardWriter
from ctl.metrics.tensorboard_log import TensorBoardLog
from tensorboard.compat.proto import event_pb2, graph_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard_runs import INFO, accumulated, attempt, files, graph, raw_events, scalar_steps


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "run" / "logs"


@pytest.fixture
def warnings_logged(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [r.getMessage() for r in caplog.records if "TensorBoard" in r.getMessage()]


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
    names = [path.name for path in files(logs / "train")]
    assert len({name.split(".")[3] for name in names}) == len(names)


def test_a_start_from_nothing_takes_back_everything(logs):
    attempt(logs, 0, range(1, 9), evals=(4,))
    attempt(logs, 0, [1])
    assert scalar_steps(logs / "train") == [1]
    assert scalar_steps(logs / "eval") == []


def test_a_file_of_which_nothing_remains_is_removed(logs):
    attempt(logs, 0, range(1, 5))
    attempt(logs, 4, range(5, 9))
    for _ in range(5):
        attempt(logs, 4, range(5, 9))
    assert len(files(logs / "train")) == 2


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_tail_is_cut_and_the_whole_records_stay(logs, cut):
    writer = TensorBoardWriter(logs)
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0})
    writer.note(Ended(5, RunEnd.DONE))
    (path,) = files(logs / "train")
    path.write_bytes(path.read_bytes()[:-cut])
    attempt(logs, 5, range(6, 8))
    assert scalar_steps(logs / "train") == [1, 2, 3, 4, 6, 7]
    assert sum(len(data) + 16 for data in read_records(path)) == path.stat().st_size


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\xff" * 7, b"\xff" * 50, b"\x08" + b"\0" * 50])
def test_rubbish_at_the_end_is_cut(logs, tail):
    attempt(logs, 0, range(1, 6))
    path = files(logs / "train")[-1]
    path.write_bytes(path.read_bytes() + tail)
    attempt(logs, 5, [6])
    assert scalar_steps(logs / "train") == [1, 2, 3, 4, 5, 6]


def test_an_interrupted_rewrite_leaves_the_old_events_whole(logs, monkeypatch, warnings_logged):
    monkeypatch.setattr("ctl.metrics.tensorboard._CLOSE_RETRY_SECS", 0.3)
    attempt(logs, 0, range(1, 9))
    before = [path.read_bytes() for path in files(logs / "train")]

    def refuse(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    attempt(logs, 4, [5])
    assert [path.read_bytes() for path in files(logs / "train")] == before
    assert ["lost" in message for message in warnings_logged()] == [False, True]


def test_nothing_but_event_files_is_left_in_the_folder(logs):
    attempt(logs, 0, range(1, 9))
    attempt(logs, 4, range(5, 9))
    assert {path.name[:19] for path in (logs / "train").iterdir()} == {"events.out.tfevents"}


def test_a_running_tensorboard_forgets_what_was_taken_back(logs):
    attempt(logs, 0, range(1, 9))
    watching = accumulated(logs / "train")
    attempt(logs, 4, range(5, 7))
    watching.Reload()
    assert [event.step for event in watching.Tensors("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_second_program_keeps_writing_after_its_file_was_rewritten(logs):
    evaluator = TensorBoardLog(logs, clock=lambda: 1000.0)
    evaluator.scalars(1000.0, 4, {"loss": 1.0}, "eval")
    evaluator.scalars(1000.0, 8, {"loss": 1.0}, "eval")
    evaluator.flush()
    attempt(logs, 4, [5])
    evaluator.scalars(1000.0, 9, {"loss": 1.0}, "eval")
    evaluator.close()
    assert scalar_steps(logs / "eval") == [4, 9]


def test_a_removed_folder_is_made_again(logs):
    log = TensorBoardLog(logs, clock=lambda: 1000.0)
    log.scalars(1000.0, 1, {"loss": 1.0}, "train")
    for path in files(logs / "train"):
        path.unlink()
    (logs / "train").rmdir()
    log.scalars(1000.0, 2, {"loss": 1.0}, "train")
    log.close()
    assert scalar_steps(logs / "train") == [1, 2]  # the first had not been written yet


def test_a_killed_program_leaves_a_folder_that_can_be_resumed(logs):
    program = (
        "import os, sys; from ctl.metrics.tensorboard_log import TensorBoardLog; "
        "log = TensorBoardLog(__import__('pathlib').Path(sys.argv[1]), lambda: 1000.0); "
        "[log.scalars(1000.0, step, {'loss': 1.0}, 'train') for step in range(1, 2000)]; "
        "os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(logs)], check=False, timeout=60)
    last = scalar_steps(logs / "train")[-1]
    assert 100 < last < 1999
    attempt(logs, 100, range(101, 104))
    assert scalar_steps(logs / "train") == list(range(1, 104))


def test_a_file_with_nothing_to_remove_is_not_touched(tmp_path):
    folder = EventFolder(tmp_path, clock=lambda: 1.0)
    folder.add(1.0, 1)
    folder.close()
    before = [(path.name, path.stat().st_ino) for path in tmp_path.iterdir()]
    folder.keep_only(lambda event: True)
    assert [(path.name, path.stat().st_ino) for path in tmp_path.iterdir()] == before


def test_a_graph_that_comes_late_costs_no_numbers(logs):
    attempt(logs, 0, [1])
    log = TensorBoardLog(logs, clock=lambda: 1000.0)
    log.start(Started(1, None, INFO), 1000.0)
    for step in range(2, 1002):
        log.scalars(1000.0, step, {"loss": 1.0}, "train")
    log.trace(Traced(graph("late")), 1000.0)
    log.scalars(1000.0, 1002, {"loss": 1.0}, "train")
    log.close()
    assert scalar_steps(logs / "train") == list(range(1, 1003))
    assert sum(bool(event.graph_def) for event in raw_events(logs / "train")) == 1


def test_records_of_another_writer_are_understood(tmp_path):
    folder = EventFolder(tmp_path, clock=lambda: 1.0)
    path = tmp_path / "events.out.tfevents.0000000001.host"
    with open(path, "wb") as file:
        for step in range(4):
            RecordWriter(file).write(event_pb2.Event(step=step).SerializeToString())
    folder.keep_only(lambda event: event.step < 2)
    steps = [event_pb2.Event.FromString(data).step for data in read_records(path)]
    assert steps == [0, 1]


def test_cards_and_graphs_do_not_pile_up(logs):
    for start in range(4):
        attempt(logs, start, [start + 1], evals=(start + 1,), name=f"node_{start}")
    events = raw_events(logs / "train") + raw_events(logs / "eval")
    graphs = [graph_pb2.GraphDef.FromString(e.graph_def) for e in events if e.graph_def]
    tags = [value.tag for event in events for value in event.summary.value]
    assert [g.node[0].name for g in graphs] == ["node_3"]
    assert tags.count("configuration") == tags.count("model") == 1
    assert tags.count("_hparams_/session_start_info") == 1
    assert sum(event.HasField("session_log") for event in events) <= 2
