"""What every report owes the trainer, whoever reads it."""

import io
import subprocess
import sys

import numpy as np
import pytest
from ctl.metrics.console import ConsoleReport
from ctl.metrics.jsonl import JsonlReport
from ctl.metrics.memory import MemoryReport
from ctl.metrics.protocol import (
    Ended,
    NullReport,
    Progressed,
    Report,
    RunInfo,
    Saved,
    Started,
    Traced,
)
from ctl.metrics.tensorboard import TensorBoardReport

INFO = RunInfo(
    model="Mnist",
    strategy="mirrored",
    num_workers=1,
    num_replicas=2,
    global_batch_size=64,
    data="1,000 examples",
    precision="float32",
    seed=7,
    model_dir=None,
    parameters=(("dense/kernel", (784, 10), "float32", True),),
    config={"steps": 20},
    hparams={"width": 8},
)


class Graph:
    def SerializeToString(self) -> bytes:
        return b""


@pytest.fixture(params=["null", "memory", "jsonl", "tensorboard", "plain console", "live console"])
def report(request, tmp_path):
    return {
        "null": NullReport,
        "memory": MemoryReport,
        "jsonl": lambda: JsonlReport(tmp_path / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardReport(tmp_path / "logs"),
        "plain console": lambda: ConsoleReport(io.StringIO(), live=False),
        "live console": lambda: ConsoleReport(io.StringIO(), live=True),
    }[request.param]()


@pytest.fixture(autouse=True)
def no_report_gave_up(caplog):
    yield
    assert "cannot be written" not in caplog.text


def test_every_report_fulfils_the_protocol(report):
    assert isinstance(report, Report)


def test_a_whole_run_can_be_told(report):
    report.note(Started(0, 20, INFO))
    report.write(10, {"loss": 0.5, "steps_per_sec": 3.0})
    report.note(Traced(Graph()))
    report.note(Progressed(10))
    report.write(10, {"loss": 0.6}, run="eval")
    report.note(Saved(10, "ckpt-10"))
    report.note(Ended(20, "done", {"loss": 0.5}))


def test_a_run_of_unknown_length_without_weights_can_be_told(report):
    bare = RunInfo("M", "one_device", 1, 1, 8, "", "float32", 0, None)
    report.note(Started(0, None, bare))
    report.write(1, {"loss": 1.0})
    report.note(Progressed(1))
    report.note(Ended(1, "data ended"))


def test_numbers_and_marks_may_come_before_the_start_and_after_the_end(report):
    report.note(Progressed(1))
    report.note(Saved(1, "ckpt-1"))
    report.note(Traced(Graph()))
    report.write(1, {"loss": 1.0})
    report.note(Started(1, 2, INFO))
    report.note(Ended(2, "done"))
    report.write(2, {"loss": 1.0}, run="eval")
    report.note(Progressed(3))
    report.note(Ended(2, "done"))


def test_a_second_end_and_an_end_without_a_start_are_tolerated(report):
    report.note(Ended(0, "failed: no data"))
    report.note(Ended(0, "failed: no data"))


def test_one_report_can_tell_two_runs(report):
    for first in (0, 10):
        report.note(Started(first, first + 10, INFO, resumed_from=None))
        report.write(first + 10, {"loss": 1.0})
        report.note(Ended(first + 10, "done"))


def test_numbers_of_numpy_and_numbers_that_are_not_finite_are_taken(report):
    report.note(Started(0, 20, INFO))
    report.write(1, {"a": np.float32(0.1), "b": np.int64(3), "c": float("nan"), "d": -np.inf})
    report.write(2, {}, run="train")
    report.note(Ended(1, "failed: loss is nan"))


def test_an_unknown_event_is_ignored(report):
    report.note(object())
    report.note(Ended(0, "done"))


def test_what_is_written_is_not_changed_by_the_caller_later():
    report, values = MemoryReport(), {"loss": 1.0}
    report.write(1, values)
    values["loss"] = 2.0
    assert report.rows == [("train", 1, {"loss": 1.0})]


def test_memory_keeps_rows_and_events_in_order():
    report = MemoryReport()
    report.write(1, {"loss": 1.0})
    report.write(1, {"loss": 2.0}, run="eval")
    report.note(Progressed(1))
    assert report.rows == [("train", 1, {"loss": 1.0}), ("eval", 1, {"loss": 2.0})]
    assert report.events == [Progressed(1)]


def test_reports_can_be_imported_without_tensorflow(tmp_path):
    program = (
        "import sys, ctl.metrics.console, ctl.metrics.jsonl, ctl.metrics.memory, "
        "ctl.metrics.tensorboard as t; r = t.TensorBoardReport(sys.argv[1]); "
        "r.write(1, {'a': 1.0}); from ctl.metrics.protocol import Ended; r.note(Ended(1, 'done')); "
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
