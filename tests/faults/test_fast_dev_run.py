"""Short runs of a whole program that leave no files."""

import json
import sys

import ctl
import processes
import pytest
from conftest import PROGRAMS, ROOT, environment
from small_models import Small
from training import run

pytestmark = pytest.mark.workers
MODELS = ["mnist", "gan", "simclr", "resnet", "recommender", "language", "cartpole"]


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path, monkeypatch):
    """Directory of temporary files of the programs, in which a run must leave no directory."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    assert not list(directory.glob("ctl-fast-dev-run*"))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_parts_of_the_program_run_and_no_file_is_left(workers, tmp_path):
    options = ["--fast_dev_run", "--epochs=3", "--export=keras", "--max_eval_batches=1"]
    result = run(tmp_path / "run", *options, workers=workers, EVALUATES="1")
    assert result.code == 0, result.output[-2000:]
    assert "trained 2 steps, evaluated, saved a checkpoint, exported keras. The temporary" in result.output
    assert result.output.count("--fast_dev_run: ") == 1, "only the chief reports it"
    summary = result.output.partition("done at step 2")[2]
    assert "eval loss" in summary and "TensorBoard" not in summary and "ctl-fast-dev-run" not in summary
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_evaluator_ends_and_the_chief_evaluates(tmp_path):
    config = {"cluster": {"chief": ["127.0.0.1:1"], "evaluator": ["127.0.0.1:2"]}}
    for task_type, message in [("evaluator", "so this evaluator ends"), ("chief", "2 steps, evaluated")]:
        task = json.dumps({**config, "task": {"type": task_type, "index": 0}})
        result = run(tmp_path / "run", "--fast_dev_run", EVALUATES="1", TF_CONFIG=task)
        assert result.code == 0 and message in result.output, result.output[-2000:]


def test_an_error_of_the_program_is_reported_and_no_file_is_left(tmp_path):
    result = run(tmp_path / "run", "--fast_dev_run", faults="raise@2")
    assert result.code == 1 and "a fault that was asked for" in result.output
    assert "trained 2 steps" not in result.output


def test_a_model_directory_of_the_platform_gets_no_model(tmp_path):
    served = tmp_path / "served"
    result = run(tmp_path / "run", "--fast_dev_run", "--export=saved_model", AIP_MODEL_DIR=str(served))
    assert result.code == 0 and "exported saved_model" in result.output and not served.exists()


def test_a_signal_before_the_first_step_leaves_no_file(tmp_path):
    assert run(tmp_path / "run", "--fast_dev_run", faults="term@build").code == 143


OWN_SETTINGS = """
import sys, ctl
sys.path[:0] = [{programs!r}]
from small_models import Small

class Own(Small):
    epochs, max_secs = 3, 0.001


if __name__ == "__main__":
    ctl.run(Own, checkpoints=ctl.ChiefOnlyCheckpoints({directory!r}))
"""


def test_checkpoints_and_lengths_of_the_program_are_not_used(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(OWN_SETTINGS.format(programs=str(PROGRAMS), directory=str(tmp_path / "own")))
    command = [sys.executable, str(program), "--fast_dev_run", "--export=none"]
    result = processes.run(command, env=environment())
    assert result.returncode == 0, result.stderr[-2000:]
    assert "trained 2 steps" in result.stderr and not (tmp_path / "own").exists()


def test_a_mode_that_does_not_train_is_refused(tmp_path):
    result = run(tmp_path / "run", "--fast_dev_run", "--mode=eval")
    assert result.code == 2 and "got --fast_dev_run and --mode=eval" in result.output


def test_it_is_no_setting_of_a_trainer():
    with pytest.raises(ctl.UsageError, match=r"fast_dev_run=.* of ctl.run only. Write train\(2\)"):
        Small(fast_dev_run=True, writers=[])
    with pytest.raises(ctl.UsageError, match=r"fast_dev_run is a flag .* Write trainer.train\(2\)"):
        Small(config=ctl.Config(fast_dev_run=True), writers=[]).train(50)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_model_trains_with_half_precision(name):
    options = ["--precision=mixed_bfloat16", "--fast_dev_run", "--export=none", "--global_batch_size=8"]
    command = [sys.executable, "-m", f"models.{name}", *options]
    result = processes.run(command, cwd=ROOT, env=environment())
    assert result.returncode == 0 and "trained 2 steps" in result.stderr, result.stderr[-2000:]
