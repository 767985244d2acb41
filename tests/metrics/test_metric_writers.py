"""Behaviour that the trainer requires of every writer."""

import io
import subprocess
import sys

import numpy as np
import pytest
from conftest import TIMEOUT_SECS
from ctl.metrics.console import ConsoleWriter
from ctl.metrics.jsonl import JsonlWriter
from ctl.metrics.memory import MemoryWriter
from ctl.metrics.protocol import (
    Ended,
    MetricWriter,
    NullWriter,
    Progressed,
    RunEnd,
    RunInfo,
    Saved,
    Started,
    Traced,
)
from ctl.metrics.tensorboard import TensorBoardWriter

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
def writer(request, tmp_path):
    return {
        "null": NullWriter,
        "memory": MemoryWriter,
        "jsonl": lambda: JsonlWriter(tmp_path / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardWriter(tmp_path / "logs"),
        "plain console": lambda: ConsoleWriter(io.StringIO(), live=False),
        "live console": lambda: ConsoleWriter(io.StringIO(), live=True),
    }[request.param]()


@pytest.fixture(autouse=True)
def check_no_write_failed(caplog):
    yield
    assert "cannot be written" not in caplog.text


def test_every_writer_fulfils_the_protocol(writer):
    assert isinstance(writer, MetricWriter)


def test_all_events_of_a_run_are_accepted(writer):
    writer.note(Started(0, 20, INFO))
    writer.write(10, {"loss": 0.5, "steps_per_sec": 3.0})
    writer.note(Traced(Graph()))
    writer.note(Progressed(10))
    writer.write(10, {"loss": 0.6}, run="eval")
    writer.note(Saved(10, "ckpt-10"))
    writer.note(Ended(20, RunEnd.DONE, {"loss": 0.5}))


def test_a_run_of_unknown_length_without_weights_is_accepted(writer):
    without_weights = RunInfo("M", "one_device", 1, 1, 8, "", "float32", 0, None)
    writer.note(Started(0, None, without_weights))
    writer.write(1, {"loss": 1.0})
    writer.note(Progressed(1))
    writer.note(Ended(1, RunEnd.DATA_ENDED))


def test_metrics_and_events_are_accepted_before_the_start_and_after_the_end(writer):
    writer.note(Progressed(1))
    writer.note(Saved(1, "ckpt-1"))
    writer.note(Traced(Graph()))
    writer.write(1, {"loss": 1.0})
    writer.note(Started(1, 2, INFO))
    writer.note(Ended(2, RunEnd.DONE))
    writer.write(2, {"loss": 1.0}, run="eval")
    writer.note(Progressed(3))
    writer.note(Ended(2, RunEnd.DONE))


def test_a_second_end_and_an_end_without_a_start_are_tolerated(writer):
    writer.note(Ended(0, RunEnd.FAILED, detail="UsageError"))
    writer.note(Ended(0, RunEnd.FAILED, detail="UsageError"))


def test_one_writer_accepts_two_runs(writer):
    for first in (0, 10):
        writer.note(Started(first, first + 10, INFO, resumed_from=None))
        writer.write(first + 10, {"loss": 1.0})
        writer.note(Ended(first + 10, RunEnd.DONE))


def test_numbers_of_numpy_and_numbers_that_are_not_finite_are_accepted(writer):
    writer.note(Started(0, 20, INFO))
    writer.write(1, {"a": np.float32(0.1), "b": np.int64(3), "c": float("nan"), "d": -np.inf})
    writer.write(2, {}, run="train")
    writer.note(Ended(1, RunEnd.FAILED, detail="NonFiniteError"))


def test_an_unknown_event_is_ignored(writer):
    writer.note(object())
    writer.note(Ended(0, RunEnd.DONE))


def test_later_changes_of_the_values_do_not_change_written_rows():
    writer, values = MemoryWriter(), {"loss": 1.0}
    writer.write(1, values)
    values["loss"] = 2.0
    assert writer.rows == [("train", 1, {"loss": 1.0})]


def test_memory_keeps_rows_and_events_in_order():
    writer = MemoryWriter()
    writer.write(1, {"loss": 1.0})
    writer.write(1, {"loss": 2.0}, run="eval")
    writer.note(Progressed(1))
    assert writer.rows == [("train", 1, {"loss": 1.0}), ("eval", 1, {"loss": 2.0})]
    assert writer.events == [Progressed(1)]


def test_writers_can_be_imported_without_tensorflow(tmp_path):
    """TensorFlow is imported with the first value."""
    program = (
        "import sys, ctl.metrics.console, ctl.metrics.jsonl, ctl.metrics.memory, "
        "ctl.metrics.tensorboard as t; t.TensorBoardWriter(sys.argv[1]); "
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=TIMEOUT_SECS)
