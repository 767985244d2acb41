"""Epochs on the console and in metrics.jsonl, for training data of known length."""

import io
import json

import ctl
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.callbacks.schedule import EpochLength
from ctl.metrics.protocol import Progressed, RunInfo, Started
from small_models import BATCH, Small, every_step, examples
from terminals import ESCAPES, Clock, Terminal

INFO = RunInfo("M", "one_device", 1, 1, 8, "", "float32", 0, None)
EPOCH = 4  # steps, of the data of Small with its batch size


class Data(Small):
    """A trainer with several types of training data."""

    def __init__(self, data_type="arrays", **options):
        super().__init__(**options)
        self.data_type = data_type

    def train_data(self, batch_size):
        x, y = examples()
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        if self.data_type == "unknown":
            return data.filter(lambda *_: True)
        return {"arrays": ctl.from_arrays((x, y), batch_size), "finite": data, "endless": data.repeat()}[
            self.data_type
        ]


def rows(directory, run="train"):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["run"] == run]


@pytest.mark.parametrize(("step", "epoch"), [(0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_step_that_completes_an_epoch_belongs_to_it(step, epoch):
    assert EpochLength(4).epoch_of(step) == epoch
    assert EpochLength(4.0, first=2).epoch_of(step) == epoch + 2


def test_a_step_with_examples_of_two_epochs_belongs_to_the_first_one():
    length = EpochLength(2.5)
    assert [length.epoch_of(step) for step in range(1, 7)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("epochs", some_of([1, 3], 3))
def test_the_last_epoch_is_the_number_of_requested_epochs(epochs, capsys):
    class Uneven(Data):
        def train_data(self, batch_size):
            x, y = examples()
            return ctl.from_arrays((x[: batch_size + 5], y[: batch_size + 5]), batch_size)

    Uneven("arrays", intervals=every_step()).train(epochs=epochs)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert f"epoch {epochs}/{epochs}" in lines[-1]


@pytest.mark.parametrize("data_type", some_of(["arrays", "finite"], "arrays"))
def test_the_lines_of_a_run_and_of_the_console_have_the_epoch(data_type, tmp_path, capsys):
    trainer = Data(data_type, model_dir=str(tmp_path), intervals=every_step(evaluate=ctl.Every(epochs=1)))
    trainer.train(epochs=3)
    expected = [1 + (step - 1) // EPOCH for step in range(1, 3 * EPOCH + 1)]
    assert [row["epoch"] for row in rows(tmp_path)] == expected
    assert [row["epoch"] for row in rows(tmp_path, "eval")] == [1, 2, 3]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split("  ")[1] for line in lines] == [f"epoch {n}/3" for n in expected]


def test_a_resumed_run_continues_the_number_of_the_epoch(tmp_path):
    for epochs in (1, 2):
        trainer = Data(model_dir=str(tmp_path), intervals=every_step())
        trainer.train(epochs=epochs)
    assert [row["epoch"] for row in rows(tmp_path)] == [1] * EPOCH + [2] * EPOCH


def test_data_of_unknown_length_have_epochs_after_the_first_pass(tmp_path):
    Data("unknown", model_dir=str(tmp_path), intervals=every_step()).train(epochs=3)
    assert [row.get("epoch") for row in rows(tmp_path)] == [None] * EPOCH + [2] * EPOCH + [3] * EPOCH


def test_endless_data_have_no_epochs(tmp_path, capsys):
    Data("endless", model_dir=str(tmp_path), intervals=every_step()).train(6)
    assert not [row for row in rows(tmp_path) if "epoch" in row] and len(rows(tmp_path)) == 6
    assert "epoch" not in capsys.readouterr().out


def test_two_replicas_have_the_epochs_of_one_device(tmp_path, two_replicas):
    Data(strategy=two_replicas, model_dir=str(tmp_path), intervals=every_step()).train(EPOCH + 1)
    assert [row["epoch"] for row in rows(tmp_path)] == [1] * EPOCH + [2]


def test_a_metric_with_the_name_epoch_keeps_its_value(tmp_path):
    writer = ctl.JsonlWriter(tmp_path / "metrics.jsonl")
    writer.note(Started(0, 8, INFO))
    writer.note(EpochLength(4))
    writer.write(5, {"epoch": 7.5})
    writer.write(5, {"loss": 1.0})
    assert [row["epoch"] for row in rows(tmp_path)] == [7.5, 2]


def test_a_new_run_of_a_writer_forgets_the_epochs_of_the_earlier_one(tmp_path):
    file, path = io.StringIO(), tmp_path / "metrics.jsonl"
    for writer in (ctl.JsonlWriter(path), ctl.ConsoleWriter(file, live=False)):
        writer.note(Started(0, 8, INFO))
        writer.note(EpochLength(4))
        writer.note(Started(0, 8, INFO))
        writer.write(5, {"loss": 1.0})
    assert "epoch" not in rows(tmp_path)[0] and "epoch" not in file.getvalue()


@pytest.mark.parametrize(("columns", "shows_rates"), [(60, False), (120, True)])
def test_the_bar_shows_the_epoch_before_the_rates(columns, shows_rates, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    clock, terminal = Clock(), Terminal()
    writer = ctl.ConsoleWriter(terminal, live=True, clock=clock)
    writer.note(Started(0, 20_000, INFO))
    writer.note(EpochLength(4_000))
    writer.write(5_000, {"loss": 0.0001834, "steps_per_sec": 412.0, "examples_per_sec": 52_700.0})
    clock.now += 1.0
    writer.note(Progressed(5_000))
    last = [line for line in ESCAPES.sub("", terminal.getvalue()).splitlines() if "train" in line][-1]
    assert "5000/20000  epoch 2/5" in last and "eta" in last and len(last.rstrip()) <= columns
    assert ("steps/s" in last) == shows_rates
    assert "loss 0.0001834" in ESCAPES.sub("", terminal.getvalue())


def test_batches_per_epoch_follow_the_batch_size():
    writer = ctl.MemoryWriter()
    Small(global_batch_size=BATCH // 2, writers=[writer], intervals=every_step()).train(2)
    lengths = [event for event in writer.events if isinstance(event, EpochLength)]
    assert lengths == [EpochLength(2.0 * EPOCH)]
