"""Short runs of a whole program that leave no files."""

import json
import tempfile
from pathlib import Path

import pytest
from training import run

pytestmark = pytest.mark.workers


def temporary_directories():
    return set(Path(tempfile.gettempdir()).glob("ctl-fast-dev-run-*"))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_parts_of_the_program_run_and_no_file_is_left(workers, tmp_path):
    before = temporary_directories()
    options = ["--fast_dev_run", "--epochs=3", "--export=keras", "--max_eval_batches=1"]
    result = run(tmp_path / "run", *options, workers=workers, EVALUATES="1")
    assert result.code == 0, result.output[-2000:]
    assert "trained 2 steps, evaluated, saved a checkpoint, exported keras; all files" in result.output
    assert result.output.count("--fast_dev_run: ") == 1, "only the chief reports it"
    assert not (tmp_path / "run" / "checkpoints").exists() and temporary_directories() == before


def test_an_evaluator_ends_and_the_chief_evaluates(tmp_path):
    config = {"cluster": {"chief": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:2"]}}
    for task_type, message in [("evaluator", "so this evaluator ends"), ("chief", "2 steps, evaluated")]:
        task = json.dumps({**config, "task": {"type": task_type, "index": 0}})
        result = run(tmp_path / "run", "--fast_dev_run", EVALUATES="1", TF_CONFIG=task)
        assert result.code == 0 and message in result.output, result.output[-2000:]


def test_an_error_of_the_program_is_reported_and_no_file_is_left(tmp_path):
    before = temporary_directories()
    result = run(tmp_path / "run", "--fast_dev_run", faults="raise@2")
    assert result.code == 1 and "a fault that was asked for" in result.output
    assert "all files are removed" not in result.output and temporary_directories() == before


def test_a_model_directory_of_the_platform_gets_no_model(tmp_path):
    served = tmp_path / "served"
    result = run(tmp_path / "run", "--fast_dev_run", "--export=saved_model", AIP_MODEL_DIR=str(served))
    assert result.code == 0 and "exported saved_model" in result.output and not served.exists()


def test_a_mode_that_does_not_train_is_refused(tmp_path):
    result = run(tmp_path / "run", "--fast_dev_run", "--mode=eval")
    assert result.code == 2 and "got --fast_dev_run and --mode=eval" in result.output
