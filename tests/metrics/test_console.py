"""Output of both consoles, and the lines of a log file."""

import io
import re
import subprocess
import sys

import pytest
from conftest import TIMEOUT_SECS
from ctl.metrics.console import ConsoleWriter
from ctl.metrics.protocol import Ended, Progressed, RunEnd, RunInfo, Saved, Started, Traced
from terminals import ESCAPES, Clock, Terminal

ODD_NAMES = ("loss [/epoch]", "[mean]", "[red]x", ":smile:", "100%")


def info(num_parameters=2, **changes):
    parameters = tuple((f"layer_{i}/kernel", (10, 10 + i), "float32", i > 0) for i in range(num_parameters))
    fields = {
        "model": "Mnist",
        "strategy": "multi_worker",
        "num_workers": 2,
        "num_replicas": 4,
        "global_batch_size": 128,
        "data": "60,000 examples",
        "precision": "float32",
        "seed": 7,
        "model_dir": "runs/1",
        "parameters": parameters,
    }
    return RunInfo(**{**fields, **changes})


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def line_writer(clock):
    file = io.StringIO()
    return ConsoleWriter(file, live=False, clock=clock), file


def visible_text(file):
    """Returns the written text without escape codes."""
    return ESCAPES.sub("", file.getvalue())


def test_rich_is_imported_for_a_run_and_its_progress_bar_for_a_terminal():
    program = (
        "import io, sys, ctl; assert 'rich' not in sys.modules; writer = ctl.ConsoleWriter; "
        "writer(live=False); assert 'rich.progress' not in sys.modules; "
        "writer(io.StringIO(), live=True); assert 'rich.progress' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=TIMEOUT_SECS)


def test_a_line_of_training_has_the_documented_format(clock):
    writer, file = line_writer(clock)
    writer.note(Started(0, 500, info()))
    writer.note(Progressed(100))
    clock.now += 1.0
    writer.write(
        200,
        {
            "loss": 0.230119,
            "accuracy": 0.931,
            "steps_per_sec": 412.3,
            "examples_per_sec": 52_710.0,
            "learning_rate": 0.001,
            "gradient_norm": 1.3187,
        },
    )
    assert file.getvalue().splitlines()[-1] == (
        "step 200/500  loss 0.2301  accuracy 0.931  lr 0.001  grad 1.319  412 steps/s  "
        "52.7k examples/s  eta 0:03"
    )


def test_evaluations_and_saves_have_separate_lines(clock):
    writer, file = line_writer(clock)
    writer.write(200, {"loss": 0.25}, run="eval")
    writer.note(Saved(200, "ckpt-200"))
    assert file.getvalue() == "eval step 200  loss 0.25\nsaved ckpt step 200\n"


def test_the_header_shows_model_strategy_and_data(clock):
    writer, file = line_writer(clock)
    writer.note(Started(400, 500, info(), resumed_from="resumed from ckpt-400"))
    text = file.getvalue()
    for fact in (
        "Mnist",
        "multi_worker, 2 workers, 4 replicas",
        "128 examples, 32 per replica",
        "400 to 500",
        "60,000 examples",
        "float32",
        "7",
        "runs/1",
        "210, 110 trainable, 840 B",
        "resumed from ckpt-400",
    ):
        assert fact in text
    assert re.search(r"layer_1/kernel +10 x 11 +110\n", text)
    assert not re.search(r" \n", text)


def test_a_new_run_does_not_mention_a_resume(clock):
    writer, file = line_writer(clock)
    writer.note(Started(0, 500, info()))
    assert "resumed" not in file.getvalue()


@pytest.mark.parametrize(("num_weights", "rows"), [(8, 8), (9, 0)])
def test_only_a_few_weights_are_listed(clock, num_weights, rows):
    writer, file = line_writer(clock)
    writer.note(Started(0, 500, info(num_parameters=num_weights)))
    assert file.getvalue().count("layer_") == rows
    assert re.search(r"parameters +[\d,]+, [\d,]+ trainable", file.getvalue())


def test_bytes_count_the_width_of_the_dtype(clock):
    writer, file = line_writer(clock)
    weights = (("a", (1000, 1000), "bfloat16", True), ("b", (1000, 1000), "float64", False))
    writer.note(Started(0, 1, info(parameters=weights)))
    assert "2,000,000, 1,000,000 trainable, 10.00 MB" in file.getvalue()


def test_the_eta_of_a_resumed_run_uses_only_its_own_steps(clock):
    writer, file = line_writer(clock)
    writer.note(Started(400, 500, info()))
    clock.now += 10.0  # tracing and the first loop
    writer.note(Progressed(410))
    clock.now += 10.0
    writer.write(420, {"loss": 1.0})
    assert file.getvalue().splitlines()[-1] == "step 420/500  loss 1  1 steps/s  eta 1:20"


def test_the_loop_that_compiles_has_neither_speed_nor_eta(clock):
    writer, file = line_writer(clock)
    writer.note(Started(0, 500, info()))
    clock.now += 50
    writer.note(Progressed(1))
    writer.write(1, {"loss": 1.0})
    assert file.getvalue().splitlines()[-1] == "step 1/500  loss 1"
    clock.now += 0.01
    writer.write(2, {"loss": 1.0})
    assert file.getvalue().splitlines()[-1] == "step 2/500  loss 1  100 steps/s  eta 0:05"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("compiles", ["the step again", "the first evaluation"])
def test_later_compilations_do_not_change_the_eta(live, compiles, clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live, clock=clock)
    writer.note(Started(0, 500, info()))
    for step in range(1, 12):
        clock.now += 0.1
        writer.note(Progressed(step))
    clock.now += 50
    if compiles == "the step again":
        writer.note(Traced(None))
        writer.note(Progressed(12))
    else:
        writer.write(11, {"loss": 1.0}, run="eval")
    clock.now += 0.1
    writer.write(13, {"loss": 1.0})
    assert re.search(r"13/500.* eta 0:4[4-9]", visible_text(file))


def test_without_a_known_end_there_is_no_eta(clock):
    writer, file = line_writer(clock)
    writer.note(Started(0, None, info()))
    writer.note(Progressed(1))
    clock.now += 1
    writer.write(6, {"loss": 1.0})
    assert file.getvalue().splitlines()[-1] == "step 6  loss 1  5 steps/s"
    assert "0 to the end of the data" in file.getvalue()


def test_characters_the_log_cannot_encode_are_escaped(clock):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleWriter(file, clock=clock).write(1, {"größe": 1.0})
    assert raw.getvalue() == b"step 1  gr\\xf6\\xdfe 1\n"


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("live", [False, True])
def test_a_metric_name_is_never_markup(name, live, clock, wide):
    file = Terminal()
    writer = ConsoleWriter(file, live, clock=clock)
    writer.write(1, {name: 0.5})
    writer.note(Started(0, 500, info(model=name, data=name), resumed_from=name))
    clock.now += 1
    writer.write(2, {name: 0.25})
    writer.write(2, {name: 0.125}, run="eval")
    writer.note(Ended(2, RunEnd.FAILED, {name: 0.0625}, detail=name))
    text = visible_text(file)
    for shown in (f"step 1  {name} 0.5", f"{name} 0.25", f"eval step 2  {name} 0.125", f"{name} at step 2"):
        assert shown in text
    assert re.search(re.escape(name) + r" +0\.0625", text)
    assert text.count(name) >= 8


@pytest.mark.parametrize("live", [False, True])
def test_a_second_end_prints_no_line(live, clock):
    file = Terminal()
    writer = ConsoleWriter(file, live, clock=clock)
    writer.note(Ended(1, RunEnd.DONE))
    writer.note(Ended(1, RunEnd.DONE))
    assert file.getvalue().count("done") == 1


@pytest.mark.parametrize("live", [False, True])
def test_a_broken_pipe_is_an_ordinary_error(live, clock):
    class BrokenPipe(Terminal):
        def write(self, text):
            raise BrokenPipeError("gone")

    writer = ConsoleWriter(BrokenPipe(), live, clock=clock)
    with pytest.raises(BrokenPipeError):
        writer.note(Started(0, 500, info()))


@pytest.mark.parametrize("live", [False, True])
def test_a_closed_file_is_an_ordinary_error(live, clock):
    file = Terminal()
    writer = ConsoleWriter(file, live, clock=clock)
    file.close()
    with pytest.raises(ValueError):
        writer.note(Started(0, 500, info()))
