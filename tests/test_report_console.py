import io
import re
import sys

import pytest

from ctl.reports.console import ConsoleReport
from ctl.reports.protocol import Ended, Progressed, RunInfo, Saved, Started

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ODD_NAMES = ("loss [/epoch]", "[mean]", "[red]x", ":smile:", "100%")


class Clock:
    def __init__(self):
        self.now, self.calls = 1000.0, 0

    def __call__(self):
        self.calls += 1
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"
    writes = 0

    def isatty(self):
        return True

    def write(self, text):
        self.writes += 1
        return super().write(text)


def info(num_parameters=2, **changes):
    parameters = tuple(
        (f"layer_{i}/kernel", (10, 10 + i), "float32", i > 0) for i in range(num_parameters)
    )
    facts = {
        "model": "Mnist", "strategy": "multi_worker", "num_workers": 2, "num_replicas": 4,
        "global_batch_size": 128, "data": "60,000 examples", "precision": "float32", "seed": 7,
        "model_dir": "runs/1", "parameters": parameters,
    }
    return RunInfo(**{**facts, **changes})


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def plain(clock):
    file = io.StringIO()
    return ConsoleReport(file, live=False, clock=clock), file


def seen(file):
    """What was written, without the codes that move and colour."""
    return ESCAPES.sub("", file.getvalue())


def last_bar(file):
    """The two lines of the bar as they are now."""
    frames = seen(file).split("train ")
    return "train " + frames[-1]


def test_a_line_of_training_reads_as_in_the_manual(clock):
    report, file = plain(clock)
    report.note(Started(0, 500, info()))
    report.note(Progressed(100))
    clock.now += 1.0
    report.write(200, {"loss": 0.230119, "accuracy": 0.931, "steps_per_sec": 412.3,
                       "examples_per_sec": 52_710.0, "learning_rate": 0.001,
                       "gradient_norm": 1.3187})
    assert file.getvalue().splitlines()[-1] == (
        "step 200/500  loss 0.2301  accuracy 0.931  lr 0.001  grad 1.319  412 steps/s  "
        "52.7k examples/s  eta 0:03"
    )


def test_evaluations_and_saves_have_lines_of_their_own(clock):
    report, file = plain(clock)
    report.write(200, {"loss": 0.25}, run="eval")
    report.note(Saved(200, "ckpt-200"))
    assert file.getvalue() == "eval step 200  loss 0.25\nsaved ckpt step 200\n"


def test_the_header_says_what_runs_on_what(clock):
    report, file = plain(clock)
    report.note(Started(400, 500, info(), resumed_from="resumed from ckpt-400"))
    text = file.getvalue()
    for fact in ("Mnist", "multi_worker, 2 workers, 4 replicas", "128 examples, 32 per replica",
                 "400 to 500", "60,000 examples", "float32", "7", "runs/1",
                 "210, 110 trainable, 0.00 MB", "resumed from ckpt-400"):
        assert fact in text
    assert re.search(r"layer_1/kernel +10 x 11 +110\n", text)
    assert not re.search(r" \n", text)


def test_a_fresh_start_does_not_speak_of_resuming(clock):
    report, file = plain(clock)
    report.note(Started(0, 500, info()))
    assert "resumed" not in file.getvalue()


def test_a_long_table_of_weights_loses_its_middle_and_says_so(clock):
    report, file = plain(clock)
    report.note(Started(0, 500, info(num_parameters=50)))
    rows = [line for line in file.getvalue().splitlines() if "layer_" in line or "more" in line]
    assert len(rows) == 20
    assert rows[0].split()[0] == "layer_0/kernel" and rows[-1].split()[0] == "layer_49/kernel"
    assert "... 31 more ..." in rows[10]


def test_bytes_count_the_width_of_the_dtype(clock):
    report, file = plain(clock)
    weights = (("a", (1000, 1000), "bfloat16", True), ("b", (1000, 1000), "float64", False))
    report.note(Started(0, 1, info(parameters=weights)))
    assert "2,000,000, 1,000,000 trainable, 10.00 MB" in file.getvalue()


def test_a_resumed_run_is_as_far_from_its_end_as_its_own_pace_says(clock):
    report, file = plain(clock)
    report.note(Started(400, 500, info()))
    clock.now += 10.0                       # tracing and the first loop
    report.note(Progressed(410))
    clock.now += 10.0
    report.write(420, {"loss": 1.0})
    assert file.getvalue().splitlines()[-1] == "step 420/500  loss 1  1 steps/s  eta 1:20"


def test_without_a_known_end_there_is_no_eta(clock):
    report, file = plain(clock)
    report.note(Started(0, None, info()))
    clock.now += 1
    report.write(5, {"loss": 1.0})
    assert file.getvalue().splitlines()[-1] == "step 5  loss 1  5 steps/s"
    assert "0 to the end of the data" in file.getvalue()


def test_characters_the_log_cannot_encode_are_escaped(clock):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleReport(file, clock=clock).write(1, {"größe": 1.0})
    assert raw.getvalue() == b"step 1  gr\\xf6\\xdfe 1\n"


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("live", [False, True])
def test_a_metric_name_is_never_markup(name, live, clock, wide):
    file = Terminal()
    report = ConsoleReport(file, live, clock=clock)
    report.write(1, {name: 0.5})
    report.note(Started(0, 500, info(model=name, data=name), resumed_from=name))
    clock.now += 1
    report.write(2, {name: 0.25})
    report.write(2, {name: 0.125}, run="eval")
    report.note(Ended(2, name, {name: 0.0625}))
    text = seen(file)
    for shown in (f"step 1  {name} 0.5", f"{name} 0.25", f"eval step 2  {name} 0.125",
                  f"{name} at step 2"):
        assert shown in text
    assert re.search(re.escape(name) + r" +0\.0625", text)
    assert text.count(name) >= 8


def test_a_terminal_gets_a_bar_and_a_file_gets_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, file = Terminal(), io.StringIO()
    for output in (terminal, file):
        ConsoleReport(output, clock=clock).note(Started(0, 500, info()))
    assert "━" in terminal.getvalue() or "─" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(term, clock, monkeypatch):
    monkeypatch.setenv("TERM", term)
    file = Terminal()
    report = ConsoleReport(file, clock=clock)
    report.note(Started(0, 500, info()))
    report.write(1, {"loss": 1.0})
    assert "\x1b" not in file.getvalue() and "step 1/500" in file.getvalue()


def test_a_terminal_without_utf8_gets_lines(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    file.encoding = "latin-1"
    ConsoleReport(file, clock=clock).note(Started(0, 500, info()))
    assert "\x1b" not in file.getvalue()


def test_no_color_is_honoured(clock, wide, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    report = ConsoleReport(file, live=True, clock=clock)
    report.note(Started(0, 500, info()))
    report.note(Saved(5, "x"))
    report.note(Ended(5, "done"))
    assert "saved step 5" in file.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", file.getvalue())


def test_the_bar_shows_how_far_how_fast_and_the_newest_numbers(clock, wide):
    file = Terminal()
    report = ConsoleReport(file, live=True, clock=clock)
    report.note(Started(0, 500, info()))
    report.note(Progressed(100))
    clock.now += 2.0
    report.write(250, {"loss": 0.2301, "steps_per_sec": 75.0, "examples_per_sec": 9600.0,
                       "learning_rate": 0.001})
    clock.now += 0.2
    report.note(Saved(250, "x"))
    bar = last_bar(file)
    for word in ("250/500", "75 steps/s", "9600 examples/s", "0:02", "eta 0:04", "loss 0.2301",
                 "✓ saved step 250", "lr 0.001"):
        assert word in bar
    assert bar.count("━") == 20 and bar.count("─") == 20


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_of_the_bar_is_wider_than_the_terminal(columns, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    file = Terminal()
    report = ConsoleReport(file, live=True, clock=clock)
    report.note(Started(0, 1_000_000, info()))
    start = len(file.getvalue())
    values = {f"metric_{i}{'_and_so_on' * 4}": i / 3 for i in range(20)}
    report.note(Progressed(1000))
    clock.now += 1
    report.write(123_456, {**values, "steps_per_sec": 1.0, "examples_per_sec": 2e6,
                           "learning_rate": 0.1, "gradient_norm": 2.0})
    lines = ESCAPES.sub("", file.getvalue()[start:]).splitlines()
    assert any("123456/1000000" in line for line in lines)
    assert any("metric_0_and" in line for line in lines)
    assert max(len(line) for line in lines) <= columns


def test_a_narrow_terminal_hides_settings_before_metrics(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    file = Terminal()
    report = ConsoleReport(file, live=True, clock=clock)
    report.note(Started(0, 500, info()))
    clock.now += 1
    report.write(1, {"learning_rate": 0.001, "gradient_norm": 1.0, "loss": 0.5, "accuracy": 0.75})
    assert "loss 0.5  accuracy 0.75" in last_bar(file)
    assert "grad" not in last_bar(file)


def test_progress_is_drawn_at_most_ten_times_a_second(clock, wide):
    file = Terminal()
    report = ConsoleReport(file, live=True, clock=clock)
    report.note(Started(0, 10_000, info()))
    report.note(Progressed(1))
    writes, calls = file.writes, clock.calls
    for step in range(2, 1002):
        clock.now += 0.00005
        report.note(Progressed(step))
    assert file.writes == writes
    assert clock.calls - calls == 1000
    clock.now += 0.1
    report.note(Progressed(1002))
    assert file.writes > writes
    assert "1002/10000" in last_bar(file)


def test_the_end_shows_the_newest_step_restores_the_cursor_and_sums_up(clock, wide):
    file = Terminal()
    report = ConsoleReport(file, live=True, clock=clock)
    report.note(Started(0, 500, info()))
    report.note(Progressed(499))
    report.note(Progressed(500))                    # within 0.1 s: not drawn
    report.note(Ended(500, "done", {"time": "0:12", "best accuracy": 0.98765}))
    text = seen(file)
    assert "500/500" in text
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")
    assert re.search(r"done at step 500\n +time +0:12 *\n +best accuracy  0\.9877", text)


def test_an_evaluation_stays_above_the_bar(clock, wide):
    file = Terminal()
    report = ConsoleReport(file, live=True, clock=clock)
    report.note(Started(0, 500, info()))
    report.write(100, {"loss": 0.5}, run="eval")
    assert "eval step 100  loss 0.5\n" in seen(file)


def test_what_the_program_prints_stays_whole_and_standard_output_comes_back(
    clock, wide, monkeypatch
):
    file = Terminal()
    monkeypatch.setattr(sys, "stdout", file)
    report = ConsoleReport(live=True, clock=clock)
    report.note(Started(0, 500, info()))
    print("hello [bold]there[/bold]")
    assert "hello [bold]there[/bold]\ntrain " in seen(file)        # the bar is drawn again below
    report.note(Ended(1, "done"))
    assert sys.stdout is file


@pytest.mark.parametrize("live", [False, True])
def test_a_second_end_says_nothing_more(live, clock):
    file = Terminal()
    report = ConsoleReport(file, live, clock=clock)
    report.note(Ended(1, "done"))
    report.note(Ended(1, "done"))
    assert file.getvalue().count("done") == 1


@pytest.mark.parametrize("live", [False, True])
def test_a_broken_pipe_is_an_ordinary_error(live, clock):
    class Gone(Terminal):
        def write(self, text):
            raise BrokenPipeError("gone")

    report = ConsoleReport(Gone(), live, clock=clock)
    with pytest.raises(BrokenPipeError):
        report.note(Started(0, 500, info()))


@pytest.mark.parametrize("live", [False, True])
def test_a_closed_file_is_an_ordinary_error(live, clock):
    file = Terminal()
    report = ConsoleReport(file, live, clock=clock)
    file.close()
    with pytest.raises(ValueError):
        report.note(Started(0, 500, info()))
