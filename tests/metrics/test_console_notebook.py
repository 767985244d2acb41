"""The progress bar in the output of a notebook cell."""

import io
import logging
import re
import sys

import ctl
import pytest
import tensorflow as tf
from ctl.io import notebook
from ctl.metrics.console import ConsoleWriter
from ctl.metrics.protocol import Ended, Progressed, RunEnd, RunInfo, Saved, Started
from kernels import pretend_kernel
from rich import get_console
from small_models import Small
from terminals import Clock

INFO = RunInfo("Mnist", "default", 1, 1, 128, "60,000 examples", "float32", 7, "runs/1")


@pytest.fixture
def cell(monkeypatch):
    """Returns the displays of the cell. pytest captures printed text."""
    return pretend_kernel(monkeypatch)


def test_a_cell_has_one_bar_that_changes_and_text_around_it(cell, capsys):
    clock = Clock()
    writer = ConsoleWriter(clock=clock)
    writer.note(Started(0, 500, INFO))
    assert cell[0][-1].splitlines()[0].endswith(" 0/500  compiling…")
    clock.now += 20
    writer.note(Progressed(1))
    clock.now += 1
    writer.write(250, {"loss": 0.25})
    writer.write(250, {"loss": 0.5}, run="eval")
    clock.now += 1
    writer.note(Saved(250, "x"))
    clock.now += 1
    writer.note(Progressed(499))
    writer.note(Progressed(500))  # within 0.1 s: not drawn
    writer.note(Ended(500, RunEnd.DONE, {"time": "0:23"}))
    assert len(cell) == 1
    first, second = cell[0][-1].splitlines()
    assert re.fullmatch(r"train ━+ 500/500  [\d.]+ steps/s  0:23  eta 0:00", first)
    assert second == "loss 0.25  ✓ saved step 250"
    printed = capsys.readouterr().out
    assert printed.startswith("Mnist\n  strategy ")
    assert re.search(r"eval step 250  loss 0.5\ndone at step 500\n  time  0:23\n$", printed)
    assert "\x1b" not in printed + "".join(cell[0])
    assert not re.search(r" $", printed, re.MULTILINE)


def test_lines_of_the_bar_fit_into_a_cell(cell):
    writer = ConsoleWriter(clock=Clock())
    writer.note(Started(0, 500, INFO))
    writer.write(1, {"a_metric_with_a_name_that_is_long" * 5: 0.5})
    writer.note(Ended(1, RunEnd.DONE))
    assert max(len(line) for line in cell[0][-1].splitlines()) == get_console().width


def test_lines_are_printed_instead_of_a_bar_and_to_other_files(cell, capsys):
    file = io.StringIO()
    for writer in (ConsoleWriter(live=False, clock=Clock()), ConsoleWriter(file, clock=Clock())):
        writer.note(Started(0, 500, INFO))
        writer.write(1, {"loss": 1.0})
    assert cell == [] and capsys.readouterr().out == file.getvalue()
    assert file.getvalue().startswith("Mnist\n") and file.getvalue().endswith("step 1/500  loss 1\n")


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch):
    pretend_kernel(monkeypatch, shell="TerminalInteractiveShell")
    assert notebook.shell() is None


def test_ipython_is_not_imported_for_the_detection(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook.shell() is None and "IPython" not in sys.modules


def test_a_trainer_in_a_notebook_hides_info_messages_of_tensorflow(cell):
    log = tf.get_logger()
    level_before = log.level
    try:
        log.setLevel(logging.INFO)
        Small(strategy="default", writers=[])
        assert log.level == logging.WARNING
    finally:
        log.setLevel(level_before)


def test_run_in_a_notebook_is_refused_with_a_hint(cell):
    with pytest.raises(ctl.UsageError, match=r"Write trainer = Small\(model_dir=...\), then trainer.train"):
        ctl.run(Small)
