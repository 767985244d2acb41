"""Metric writers by name, in `ctl.run`, the constructor of a trainer, and `ctl.fit`."""

import json
import sys

import ctl
import numpy as np
import pytest
from conftest import PROGRAMS, some_of
from ctl.metrics.protocol import Ended, Exported, Joined, Started
from ctl.trackers.run_ids import run_id_of
from fitting import classifier
from small_models import Small, every_step
from tensorboard_runs import trials

FILES = {"logs", "metrics.jsonl"}


def files_of(directory):
    return {path.name for path in directory.iterdir()} & FILES


WRITERS = {
    "console": (["console"], set(), True),
    "jsonl": (("jsonl",), {"metrics.jsonl"}, False),
    "two": ("tensorboard,console", {"logs"}, True),
    "none": ([], set(), False),
    "default": (None, FILES, True),
}


@pytest.mark.parametrize("case", some_of(WRITERS, "jsonl", "two", "default"))
def test_names_replace_the_default_writers(case, tmp_path, capsys):
    names, files, has_console = WRITERS[case]
    Small(strategy="default", model_dir=str(tmp_path), writers=names, intervals=every_step()).train(2)
    assert files_of(tmp_path) == files and ("done at step 2" in capsys.readouterr().out) == has_console


def test_names_and_extra_writers_work_in_fit(tmp_path, capsys):
    x, y = np.zeros((64, 6), np.float32), np.zeros(64, np.int64)
    memory = ctl.MemoryWriter()
    options = {"model_dir": str(tmp_path), "writers": ["jsonl"], "extra_writers": [memory]}
    history = ctl.fit(classifier(), x, y, epochs=2, **options)
    assert files_of(tmp_path) == {"metrics.jsonl"} and capsys.readouterr().out == ""
    assert [row[2]["loss"] for row in memory.rows] == history.history["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"writers": ["foo"]}, "expected a list of console, tensorboard, jsonl, mlflow, wandb"),
        ({"writers": ["jsonl"]}, "there is no model_dir"),
        ({"writers": ["foo", ctl.NullWriter()]}, "expected a list of console, tensorboard, jsonl"),
        ({"writers": ["jsonl", ctl.NullWriter()]}, "there is no model_dir"),
        ({"writers": ["wandb", ctl.NullWriter()]}, r"pip install 'tf-ctl\[wandb\]'"),
        ({"writers": ["console", 3]}, "expected a list of writers"),
        ({"extra_writers": ["console"]}, "extra_writers is"),
        ({"writers": ["wandb"]}, r"pip install 'tf-ctl\[wandb\]'"),
    ],
)
def test_invalid_writers_are_refused_by_the_constructor(options, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ctl.UsageError, match=message):
        Small(strategy="default", **options)
    x, y = np.zeros((64, 6), np.float32), np.zeros(64, np.int64)
    with pytest.raises(ctl.UsageError, match=message):
        ctl.fit(classifier(), x, y, **options)


def test_names_and_writers_may_be_mixed(tmp_path, capsys):
    memory = ctl.MemoryWriter()
    options = {"strategy": "default", "model_dir": str(tmp_path), "intervals": every_step()}
    Small(writers=["jsonl", memory, "console", "jsonl"], **options).train(2)
    assert files_of(tmp_path) == {"metrics.jsonl"} and "done at step 2" in capsys.readouterr().out
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(memory.rows) == 2
    x, y = np.zeros((64, 6), np.float32), np.zeros(64, np.int64)
    ctl.fit(classifier(), x, y, model_dir=str(tmp_path / "fit"), writers=["jsonl", memory])
    assert files_of(tmp_path / "fit") == {"metrics.jsonl"} and len(memory.rows) > 2


def test_a_name_that_is_given_twice_counts_once():
    assert ctl.Config(writers="mlflow,console,mlflow").writers == ("mlflow", "console")
    assert ctl.Config(writers=["console", "console"]).writers == ("console",)


@pytest.mark.parametrize("option", ["--writers=console,foo", "--writers=jsonl"])
def test_an_invalid_flag_ends_with_code_2_before_training(option, run_program):
    (result,) = run_program(1, [str(PROGRAMS / "tracking.py"), "--train_steps=2", option])
    assert result.code == 2 and "error: writers" in result.output


def run_small(tmp_path, **options):
    memory = ctl.MemoryWriter()
    options = {"writers": [], "extra_writers": [memory], "intervals": every_step(), **options}
    trainer = Small(strategy="default", model_dir=str(tmp_path / "run"), **options)
    return trainer, memory


def run_ids(memory):
    return {event.info.run_id for event in memory.events if isinstance(event, Started)}


def test_a_resumed_run_keeps_its_identifier_and_another_directory_has_another_one(tmp_path):
    identifiers = []
    for steps in (2, 4):
        trainer, memory = run_small(tmp_path)
        trainer.train(steps)
        identifiers.append(run_ids(memory))
    assert identifiers[0] == identifiers[1] == {(tmp_path / "run" / "run_id").read_text().strip()}
    assert run_id_of(str(tmp_path)) not in identifiers[0]


def test_without_a_directory_a_trainer_keeps_its_identifier():
    memory = ctl.MemoryWriter()
    trainer = Small(strategy="default", writers=[memory])
    trainer.train(1)
    trainer.train(2)
    assert len(run_ids(memory)) == 1 and run_ids(memory) != {""}


def test_a_damaged_identifier_is_replaced(tmp_path):
    (tmp_path / "run_id").write_bytes(b"\xff\x00 /")
    run_id = run_id_of(str(tmp_path))
    assert run_id_of(str(tmp_path)) == run_id and run_id.isalnum()


def test_an_identifier_that_cannot_be_stored_is_a_warning(tmp_path, caplog):
    (tmp_path / "run_id").mkdir()
    assert run_id_of(str(tmp_path), "a1") == "a1" and "experiment trackers show a new run" in caplog.text


def test_the_export_at_the_end_is_an_event(tmp_path):
    trainer, memory = run_small(tmp_path)
    trainer.train(2, export=["weights"])
    (event,) = [event for event in memory.events if isinstance(event, Exported)]
    assert event.step == 2 and all((tmp_path / "run").as_posix() in path for path in event.paths)
    assert isinstance(memory.events[-1], Ended) and memory.events[-1].status == "done"


def test_the_end_after_an_error_has_its_class_and_first_line(tmp_path):
    class Fails(Small):
        def after_loop(self, step, means):
            raise ValueError("bad batch\nin line 2")

    memory = ctl.MemoryWriter()
    with pytest.raises(ValueError):
        Fails(strategy="default", writers=[memory]).train(2)
    assert (memory.events[-1].status, memory.events[-1].error) == ("failed", "ValueError: bad batch")


def test_the_name_of_a_trial_has_hyperparameters_and_given_settings(run_program, tmp_path):
    for directory, precision in (("a", "float32"), ("b", "mixed_bfloat16")):
        options = [f"--model_dir={tmp_path}/{directory}", "--train_steps=2", f"--precision={precision}",
                   "--learning_rate=0.05", "--writers=tensorboard", "--export=none"]  # fmt: skip
        (result,) = run_program(1, [str(PROGRAMS / "tracking.py"), *options])
        assert result.code == 0, result.output
    names = [trial.name.rpartition(" ")[0] for trial in trials(tmp_path)]
    prefix = "learning_rate=0.05,global_batch_size=128,seed=0,train_steps=2"
    assert sorted(names) == [f"{prefix},precision=float32", f"{prefix},precision=mixed_bfloat16"]


def test_an_evaluator_joins_the_run_of_the_chief(tmp_path, monkeypatch):
    trainer, memory = run_small(tmp_path)
    trainer.train(2)
    cluster = {"worker": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:2"]}
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    evaluator, evaluations = run_small(tmp_path)
    evaluator.train()
    assert not run_ids(evaluations) and evaluations.rows
    joined = [event.run_id for event in evaluations.events if isinstance(event, Joined)]
    assert set(joined) == run_ids(memory) and len(joined) == 1
