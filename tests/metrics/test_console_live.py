"""The progress bar on a terminal."""

import io
import re
import sys

import pytest
from ctl.metrics.console import ConsoleWriter
from ctl.metrics.protocol import Ended, Progressed, RunEnd, RunInfo, Saved, Started
from terminals import ESCAPES, Clock, Terminal

INFO = RunInfo("Mnist", "multi_worker", 2, 4, 128, "60,000 examples", "float32", 7, "runs/1")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def visible_text(file):
    """Returns the written text without escape codes."""
    return ESCAPES.sub("", file.getvalue())


def last_bar(file):
    """Returns the two lines of the newest bar."""
    frames = visible_text(file).split("train ")
    return "train " + frames[-1]


def test_a_terminal_has_a_bar_and_a_file_has_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, file = Terminal(), io.StringIO()
    for output in (terminal, file):
        ConsoleWriter(output, clock=clock).note(Started(0, 500, INFO))
    assert "━" in terminal.getvalue() or "─" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_has_lines(term, clock, monkeypatch):
    monkeypatch.setenv("TERM", term)
    file = Terminal()
    writer = ConsoleWriter(file, clock=clock)
    writer.note(Started(0, 500, INFO))
    writer.write(1, {"loss": 1.0})
    assert "\x1b" not in file.getvalue() and "step 1/500" in file.getvalue()


def test_a_terminal_without_utf8_has_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    file.encoding = "latin-1"
    ConsoleWriter(file, clock=clock).note(Started(0, 500, INFO))
    assert "\x1b" not in file.getvalue()


def test_the_bar_is_as_full_as_steps_are_complete(clock, wide, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")  # only the complete part is drawn
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 500, INFO))
    clock.now += 1
    writer.note(Progressed(250))
    assert last_bar(file).count("━") == 20
    writer.note(Ended(500, RunEnd.DONE))


def test_without_a_known_end_the_step_replaces_the_bar(clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, None, INFO))
    for step in (1, 6):
        clock.now += 1
        writer.note(Progressed(step))
    assert last_bar(file).startswith("train step 6  5 steps/s  0:02") and "eta" not in last_bar(file)


def test_no_color_is_respected(clock, wide, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 500, INFO))
    writer.note(Saved(5, "x"))
    writer.note(Ended(5, RunEnd.DONE))
    assert "saved step 5" in file.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", file.getvalue())


def test_the_bar_shows_progress_speed_and_the_newest_metrics(clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 500, INFO))
    writer.note(Progressed(100))
    clock.now += 2.0
    writer.write(
        250, {"loss": 0.2301, "steps_per_sec": 75.0, "examples_per_sec": 9600.0, "learning_rate": 0.001}
    )
    clock.now += 0.2
    writer.note(Saved(250, "x"))
    bar = last_bar(file)
    for part in (
        "250/500",
        "75 steps/s",
        "9600 examples/s",
        "0:02",
        "eta 0:04",
        "loss 0.2301",
        "✓ saved step 250",
        "lr 0.001",
    ):
        assert part in bar


@pytest.mark.parametrize(("columns", "num_bar_columns"), [(60, 18), (90, 31), (200, 40)])
def test_the_bar_uses_the_columns_beside_the_numbers(columns, num_bar_columns, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 500, INFO))
    clock.now += 1
    writer.write(250, {"steps_per_sec": 75.0, "examples_per_sec": 9600.0})
    line = last_bar(file).splitlines()[0]
    assert sum(line.count(part) for part in "━╸╺") == num_bar_columns and "…" not in line
    assert ("examples/s" in line) == (columns > 60)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_of_the_bar_is_wider_than_the_terminal(columns, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 1_000_000, INFO))
    start = len(file.getvalue())
    values = {f"metric_{i}{'_and_so_on' * 4}": i / 3 for i in range(20)}
    writer.note(Progressed(1000))
    clock.now += 1
    writer.write(
        123_456,
        {
            **values,
            "steps_per_sec": 1.0,
            "examples_per_sec": 2e6,
            "learning_rate": 0.1,
            "gradient_norm": 2.0,
        },
    )
    lines = ESCAPES.sub("", file.getvalue()[start:]).splitlines()
    assert any("123456/1000000" in line for line in lines)
    assert any("metric_0_and" in line for line in lines)
    assert max(len(line) for line in lines) <= columns
    assert last_bar(file).rstrip().count("\n") == 1


def test_a_narrow_terminal_hides_settings_before_metrics(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 500, INFO))
    clock.now += 1
    writer.write(1, {"learning_rate": 0.001, "gradient_norm": 1.0, "loss": 0.5, "accuracy": 0.75})
    assert "loss 0.5  accuracy 0.75" in last_bar(file)
    assert "grad" not in last_bar(file)


def test_progress_is_drawn_at_most_ten_times_a_second(clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 10_000, INFO))
    writer.note(Progressed(1))
    writes, calls = file.writes, clock.calls
    for step in range(2, 1002):
        clock.now += 0.00005
        writer.note(Progressed(step))
    assert file.writes == writes
    assert clock.calls - calls == 1000
    clock.now += 0.1
    writer.note(Progressed(1002))
    assert file.writes > writes
    assert "1002/10000" in last_bar(file)


def test_the_bar_shows_the_compilation_until_the_first_loop_is_complete(clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(400, 500, INFO))
    assert "400/500  compiling…" in last_bar(file) and "eta" not in last_bar(file)
    clock.now += 20
    writer.note(Progressed(400))  # parameter servers: the chief has polled, no step is complete
    assert "compiling…" in last_bar(file)
    clock.now += 0.01
    writer.note(Progressed(401))
    assert "401/500  0:20  eta -:--" in last_bar(file)
    clock.now += 0.1
    writer.note(Progressed(411))
    assert "411/500  100 steps/s  0:20  eta 0:01" in last_bar(file)


@pytest.mark.parametrize("reason", ["an earlier run compiled", "failed"])
def test_the_bar_shows_no_compilation_without_one(reason, clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(400, 500, INFO, compiles=reason == "failed"))
    if reason == "failed":
        writer.note(Ended(400, RunEnd.FAILED))
    assert "compiling" not in last_bar(file)


def test_the_end_shows_the_newest_step_restores_the_cursor_and_prints_a_summary(clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 500, INFO))
    writer.note(Progressed(499))
    writer.note(Progressed(500))  # within 0.1 s: not drawn
    writer.note(Ended(500, RunEnd.DONE, {"time": "0:12", "best accuracy": 0.98765}))
    text = visible_text(file)
    assert "500/500" in text
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")
    assert re.search(r"done at step 500\n +time +0:12 *\n +best accuracy  0\.9877", text)


def test_an_evaluation_stays_above_the_bar(clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live=True, clock=clock)
    writer.note(Started(0, 500, INFO))
    writer.write(100, {"loss": 0.5}, run="eval")
    assert "eval step 100  loss 0.5\n" in visible_text(file)


def test_printed_lines_stay_complete_and_standard_output_is_restored(clock, wide, monkeypatch):
    file = Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    writer = ConsoleWriter(live=True, clock=clock)
    writer.note(Started(0, 500, INFO))
    print("hello [bold]there[/bold]")
    assert "hello [bold]there[/bold]\ntrain " in visible_text(file)  # the bar is drawn again below
    writer.note(Ended(1, RunEnd.DONE))
    assert sys.stdout is file
