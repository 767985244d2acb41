"""A training program as a process: exit codes, error lines for bad flags, and files."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ctl
import numpy as np
import processes
import pytest
import tensorflow as tf
from absl import flags
from conftest import ROOT, TIMEOUT_SECS, environment
from ctl import app, config, errors
from ctl.config_flags import define_flags
from small_models import Small

MNIST = [sys.executable, "-m", "models.mnist"]
BASE = ["--train_steps=6", "--global_batch_size=32", "--save_every_steps=2", "--log_every_steps=2"]


def run(*arguments, start=processes.run):
    """Runs the program and returns its exit code, stdout and stderr."""
    result = start(
        [*MNIST, *arguments], env=environment(), cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_SECS,
    )  # fmt: skip
    return SimpleNamespace(code=result.returncode, out=result.stdout, err=result.stderr)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The model_dir of a run of 6 steps with 2 checkpoints, and the result of its process."""
    directory = tmp_path_factory.mktemp("run") / "m"
    options = "--keep=2", "--export=keras"
    result = run(*BASE, f"--model_dir={directory}", *options, start=subprocess.run)  # imports all modules
    return directory, result


@pytest.mark.workers
def test_a_run_writes_the_files_that_the_flags_request(trained):
    directory, result = trained
    assert result.code == 0 and result.err == "", result.err
    assert {p.name for p in (directory / "checkpoints").iterdir()} == {"ckpt-4", "ckpt-6"}
    assert [p.name for p in (directory / "export").iterdir()] == ["model.keras"]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    train = [r["step"] for r in rows if r.get("run") == "train"]
    assert train == [2, 4, 6] and [r["step"] for r in rows if r.get("run") == "eval"] == [6]


@pytest.mark.workers
def test_a_trained_directory_is_evaluated_and_exported_without_training(trained):
    directory, _ = trained
    before = {p: p.stat().st_mtime_ns for p in (directory / "checkpoints").rglob("*")}
    evaluated = run("--mode=eval", f"--model_dir={directory}")
    assert evaluated.code == 0 and "accuracy" in evaluated.out, evaluated.err
    exported = run("--mode=export", "--export=weights", f"--model_dir={directory}")
    assert exported.code == 0, exported.err
    path = directory / "export" / "model.weights.h5"
    assert exported.out.split()[-1] == str(path) and path.is_file()
    assert before == {p: p.stat().st_mtime_ns for p in (directory / "checkpoints").rglob("*")}


@pytest.mark.workers
def test_a_bad_setting_ends_with_2_and_one_line(tmp_path):
    for arguments, message in (
        (["--global_batch_size=7", "--strategy=mirrored", "--num_virtual_devices=2"], "6 or 8"),
        (["--keep=best"], "keep is 'best'"),
    ):
        result = run(*arguments, "--train_steps=1")
        lines = result.err.splitlines()
        assert result.code == 2, result.err
        assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.err


@pytest.mark.workers
def test_help_is_grouped_names_every_flag_and_ends_with_0():
    result = run("--help")
    assert result.code == 0 and result.err == ""
    for name in (*config.NAMES, "learning_rate", "data"):
        assert f"\n  --{name}=" in result.out
    titles = ["Model:", "Task:", "Devices and processes:", "Loop:", "Output:", "Errors:"]
    positions = [result.out.index(f"\n{title}\n") for title in titles]
    assert positions == sorted(positions)


def parse_flags(*arguments):
    values = flags.FlagValues()
    define_flags(values)
    app.parse(["program", *arguments], values)
    return values


@pytest.mark.parametrize(
    ("argument", "expected_text"),
    [
        ("--trian_steps=5", "Unknown command line flag 'trian_steps'. Write --train_steps. See"),
        ("--max_steps=5", "Unknown command line flag 'max_steps'. Write --train_steps. See"),
        ("--lr=0.1", "Unknown command line flag 'lr'. Pass it to the optimizer. See"),
        ("--qqq", "error: Unknown command line flag 'qqq'. See"),
        ("--train_steps=many", "--train_steps=many: expected a whole number"),
        ("--max_secs=1h", "--max_secs=1h: expected a number. See"),
        ("--train_steps=-1", "train_steps"),
        ("--global_batch_size=0", "global_batch_size"),
        ("--strategy=gpu", "strategy"),
        ("--epochs=-0.5", "epochs"),
        ("--mode=play", "mode"),
        ("mirrored", "mirrored"),
    ],
)
def test_a_bad_flag_ends_with_2_and_one_line_that_names_it(capsys, argument, expected_text):
    with pytest.raises(SystemExit) as caught:
        parse_flags(argument)
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("error: ") and expected_text in lines[0]
    assert lines[0].endswith("See --help.")


def run_fake_trainer(monkeypatch, *arguments):
    """Runs the app with a fake trainer and returns its options and the arguments of `train`."""
    recorded = {}

    class Fake(ctl.Trainer):
        model = SimpleNamespace(save=print, export=print, save_weights=print)

        def __init__(self, **options):
            super().__init__(strategy="default")
            recorded["options"] = options

        def prepare(self):
            recorded["trainer"] = self

        def train(self, steps, *, epochs, export):
            recorded.update(steps=steps, epochs=epochs, export=export)

    monkeypatch.setattr(flags, "FLAGS", parse_flags("--strategy=default", *arguments))
    app._main(Fake, {})
    return recorded


def usage_error_of(monkeypatch, capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        run_fake_trainer(monkeypatch, *arguments)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and len(err.splitlines()) == 1 and "Traceback" not in err
    return err


def test_predict_prints_a_line_of_json_per_example(monkeypatch, capsys, tmp_path):
    class Predicts(Small):
        step = 3

        def predict(self):
            yield {"name": tf.constant("a"), "row": [tf.constant([1, 2]), {"deep": tf.Variable(0.5)}]}
            yield {"names": tf.constant(["a", "ä"]), "bytes": b"c", "flag": np.bool_(True)}
            yield {"path": "a", "probability": np.float32(0.5)}
            yield {"path": "b", "probabilities": np.array([1.0, 0.0])}

    (tmp_path / "checkpoints").mkdir()
    arguments = ["--strategy=default", "--mode=predict", f"--model_dir={tmp_path}"]
    monkeypatch.setattr(flags, "FLAGS", parse_flags(*arguments))
    app._main(Predicts, {})
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        {"name": "a", "row": [[1, 2], {"deep": 0.5}]}, {"names": ["a", "ä"], "bytes": "c", "flag": True},
        {"path": "a", "probability": 0.5}, {"path": "b", "probabilities": [1.0, 0.0]}]  # fmt: skip
    message = usage_error_of(monkeypatch, capsys, "--mode=predict", f"--model_dir={tmp_path}")
    assert "Fake has no method predict(self)" in message


def test_predict_refuses_values_that_it_cannot_print():
    with pytest.raises(errors.UsageError, match="yielded a set; expected a dictionary"):
        json.dumps({"words": {1, 2}}, default=app._as_json)


def test_the_length_is_given_as_steps_or_epochs(monkeypatch, capsys):
    def length(*arguments):
        recorded = run_fake_trainer(monkeypatch, *arguments)
        return recorded["steps"], recorded["epochs"]

    assert length() == (1000, None)
    assert length("--train_steps=7") == (7, None)
    assert length("--epochs=1.5") == (None, 1.5)
    assert length("--epochs=2", "--train_steps=0") == (None, 2.0)
    assert length("--train_steps=0") == (None, None)
    assert "expected one of them" in usage_error_of(monkeypatch, capsys, "--epochs=1", "--train_steps=5")


def test_intervals_and_keep_come_from_flags_and_0_turns_off(monkeypatch, tmp_path):
    recorded = run_fake_trainer(
        monkeypatch, f"--model_dir={tmp_path}", "--keep=3,best=loss", "--log_every_steps=5",
        "--eval_every_steps=20", "--save_every_steps=0", "--steps_per_loop=4", "--export=none",
    )  # fmt: skip
    options, intervals = recorded["options"], recorded["options"]["intervals"]
    assert (options["checkpoints"].keep.newest, options["checkpoints"].keep.best) == (3, "loss")
    assert (intervals.log.steps, intervals.evaluate.steps, intervals.save.steps) == (5, 20, 0)
    assert intervals.steps_per_loop == 4 and recorded["export"] == ()
    assert not options["checkpoints"]._background
    saving = ["--background_save", f"--model_dir={tmp_path}", "--init_from=runs/a"]
    recorded = run_fake_trainer(monkeypatch, *saving)
    assert (
        recorded["options"]["checkpoints"]._background
        and recorded["options"]["config"].init_from == "runs/a"
    )
    default_options = run_fake_trainer(monkeypatch)["options"]
    assert default_options["config"].model_dir == "" and default_options["checkpoints"] is None
    assert (
        run_fake_trainer(monkeypatch, "--steps_per_loop=0")["options"]["intervals"].steps_per_loop == "auto"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode=eval"], "--mode=eval needs --model_dir"),
        (["--mode=predict"], "--mode=predict needs --model_dir"),
        (["--mode=export", "--export=none", "--model_dir=/tmp"], "--mode=export got --export=none"),
        (["--mode=eval", "--model_dir=/nowhere"], "no checkpoint in /nowhere/checkpoints"),
        (["--export=onnx"], "expected none, or some of keras, saved_model, weights"),
        (["--steps_per_loop=fast"], "steps_per_loop is 'fast'"),
        (["--keep=x"], "keep is 'x'"),
        (["--devices=cpu:9"], "device 'cpu:9' does not exist"),
    ],
)
def test_invalid_settings_are_refused_before_any_work(monkeypatch, capsys, arguments, message):
    assert message in usage_error_of(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("mode", ["eval", "export", "predict"])
def test_a_model_dir_that_cannot_be_searched_is_named(monkeypatch, capsys, mode):
    def refused_by_the_system(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr("ctl.io.paths.time.sleep", lambda secs: None)
    monkeypatch.setattr(Path, "is_dir", refused_by_the_system)
    message = usage_error_of(monkeypatch, capsys, f"--mode={mode}", "--model_dir=/closed")
    assert "--model_dir=/closed cannot be read: Permission denied." in message


class NoSuperCall(ctl.Trainer):
    """Trainer without a call of `super().__init__`."""

    def __init__(self, **options):
        self.options = options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoSuperCall, "NoSuperCall.__init__ has not called super().__init__(**options)"),
        (lambda **options: None, "a function that returned None; expected an instance of ctl.T"),
        (None, "ctl.run() got None; expected a subclass of ctl.Trainer, or a function that returns a"),
    ],
    ids=["a forgotten constructor", "a forgotten return", "no trainer"],
)
def test_a_program_without_a_trainer_ends_with_2(monkeypatch, capsys, make, message):
    monkeypatch.setattr(flags, "FLAGS", parse_flags("--strategy=default"))
    with pytest.raises(SystemExit) as caught:
        app._main(make, {})
    assert caught.value.code == 2 and message in capsys.readouterr().err
