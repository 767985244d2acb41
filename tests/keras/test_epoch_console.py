"""Lines and bars of the epochs of `ctl.fit`."""

import io
import json
import re

import ctl
import keras
import numpy as np
import pyte
import pytest
from conftest import some_of
from ctl.keras.data import Epochs
from ctl.keras.epoch_console import EpochConsole
from ctl.metrics.protocol import Ended, Progressed, RunEnd, RunInfo, Started
from fitting import BATCH, classifier, numbers
from terminals import Clock, Terminal

INFO = RunInfo("KerasTrainer", "default", 1, 1, 32, "", "float32", 0, None)
PLAN = Epochs(steps=32, first=0, end=3, validation_freq=1)
LINE = re.compile(r"(\d+)/\1 - \d+s - [\d.]+[mu]?s/step((?: - [a-z_]+: [\d.e-]+)+)$")
LINE_OF_KERAS = re.compile(r"(\d+)/\1 - \d+s - [\d.]+[mu]?s/step((?: - [a-z_]+: [\d.e-]+)+)$")


def titles(text):
    return re.findall(r"^Epoch \d+/\d+$", text, re.MULTILINE)


def epoch_lines(text, pattern=LINE):
    """Returns the names of the metrics of each line of an epoch."""
    matches = filter(None, map(pattern.match, text.splitlines()))
    return [re.findall(r"- ([a-z_]+):", match[2]) for match in matches]


def printed_epochs(plan, file, clock, *, start=0, live=False):
    """Yields (console, step) after each half of an epoch, and completes the epoch at its end."""
    console = EpochConsole(plan, file, live, clock=clock)
    total = plan.steps * (plan.end - plan.first)
    console.note(Started(start, total, INFO))
    for step in range(start + plan.steps // 2, total + 1, plan.steps // 2):
        clock.now += 0.5
        console.note(Progressed(step))
        yield console, step
        if plan.ended_by(step) is not None:
            console.write(step, {"loss": 0.0001834, "accuracy": 0.5, "gradient_norm": 1.0})
            if plan.is_evaluated(plan.ended_by(step)):
                console.write(step, {"loss": 2.31, "accuracy": 1.0}, "eval")


@pytest.mark.parametrize("evaluates", some_of([True, False], True))
def test_the_lines_are_those_of_keras(evaluates, capsys):
    x, y, _ = numbers()
    options = {"epochs": 3, "verbose": 2, "batch_size": BATCH, "shuffle": False}
    options |= {"validation_data": (x, y)} if evaluates else {}
    classifier().fit(x, y, **options)
    expected = capsys.readouterr().out
    ctl.fit(classifier(), x, y, **options)
    text = capsys.readouterr().out
    assert titles(text) == titles(expected) == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]
    assert epoch_lines(text) == epoch_lines(expected, LINE_OF_KERAS) and len(epoch_lines(text)) == 3
    order = [line.split()[0] for line in text.splitlines() if re.match(r"Epoch|\d+/", line)]
    assert order == ["Epoch", order[1]] * 3


def test_no_output_is_printed_with_verbose_0(capfd):
    x, y, _ = numbers()
    ctl.fit(classifier(), x, y, epochs=2, verbose=0)
    assert capfd.readouterr().out == ""


def test_a_line_has_the_time_and_metrics_with_significant_digits():
    file, clock = io.StringIO(), Clock()
    list(printed_epochs(PLAN, file, clock))
    lines = file.getvalue().splitlines()
    line = "32/32 - 1s - 31.2ms/step - accuracy: 0.5 - loss: 0.0001834 - val_accuracy: 1 - val_loss: 2.31"
    first = lines.index("Epoch 1/3")
    assert lines[first:] == ["Epoch 1/3", line, "Epoch 2/3", line, "Epoch 3/3", line]


def test_an_epoch_without_an_evaluation_ends_with_its_training_metrics():
    file = io.StringIO()
    list(printed_epochs(PLAN._replace(validation_freq=2), file, Clock()))
    assert epoch_lines(file.getvalue()) == [
        ["accuracy", "loss"], ["accuracy", "loss", "val_accuracy", "val_loss"], ["accuracy", "loss"],
    ]  # fmt: skip


def test_a_run_that_resumes_within_an_epoch_continues_it():
    file = io.StringIO()
    list(printed_epochs(PLAN, file, Clock(), start=48))
    assert titles(file.getvalue()) == ["Epoch 2/3", "Epoch 3/3"]
    assert len(epoch_lines(file.getvalue())) == 2


def test_the_evaluation_of_an_epoch_before_a_resume_does_not_end_the_next_epoch():
    file = io.StringIO()
    console = EpochConsole(PLAN, file, False)
    console.note(Started(32, 96, INFO))
    console.write(32, {"loss": 2.0}, "eval")
    assert "Epoch 1/3 - val_loss: 2\n" in file.getvalue()
    console.note(Progressed(64))
    console.write(64, {"loss": 1.0})
    console.write(64, {"loss": 1.5}, "eval")
    assert epoch_lines(file.getvalue()) == [["loss", "val_loss"]]


@pytest.mark.parametrize("live", [False, True])
def test_a_run_that_ends_within_an_epoch_prints_its_steps(live):
    file = Terminal()
    console, _ = next(iter(printed_epochs(PLAN, file, Clock(), live=live)))
    console.note(Ended(16, RunEnd.FAILED, detail="ValueError"))
    assert "16/32" in file.getvalue() and "failed: ValueError at step 16" in file.getvalue()
    assert "Epoch 2/3" not in file.getvalue()


@pytest.mark.parametrize("columns", [50, 80, 160])
def test_bars_of_a_terminal_are_aligned_and_stay_on_the_screen(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    console, _ = list(printed_epochs(PLAN, file, Clock(), live=True))[-1]
    console.note(Ended(96, RunEnd.DONE, {"eval loss": 0.0001834}))
    screen = pyte.Screen(columns, 60)
    pyte.Stream(screen).feed(file.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display]
    text = " ".join(" ".join(lines).split())
    metrics = "31.2ms/step - accuracy: 0.5 - loss: 0.0001834 - val_accuracy: 1 - val_loss: 2.31"
    assert text.count(metrics) == 3
    bars = [line for line in lines if line.startswith("32/32 ")]
    assert len(bars) == 3 and len({line.index("1s ") for line in bars}) == 1
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]


def test_the_rows_of_metrics_jsonl_have_the_epochs_of_fit(tmp_path):
    x, y, _ = numbers()
    ctl.fit(classifier(), x, y, batch_size=BATCH, initial_epoch=2, epochs=5, steps_per_epoch=1, verbose=0,
            model_dir=str(tmp_path), validation_data=(x, y))  # fmt: skip
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [3, 3, 4, 4, 5, 5]


def test_an_error_in_a_callback_ends_the_lines_with_its_cause(capsys):
    def fail(epoch, logs):
        raise ValueError("no disk")

    x = np.zeros((64, 2), np.float32)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callback = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(ValueError, match="no disk"):
        ctl.fit(model, x, x[:, :1], epochs=3, verbose=2, callbacks=[callback])
    text = capsys.readouterr().out
    assert titles(text) == ["Epoch 1/3"] and epoch_lines(text) == [["loss"]]
    assert "failed: ValueError at step 2" in text
