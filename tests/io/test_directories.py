"""Vertex AI's directories as defaults of a run, and the metric for its tuning service."""

import json
import sys

import processes
import pytest
from conftest import ROOT, environment
from ctl.errors import CtlError
from ctl.io.directories import Directories, read_directories, usable_path
from ctl.metrics.hypertune import HypertuneWriter
from ctl.training.platform_hooks import hand_over

AIP = {"AIP_CHECKPOINT_DIR": "gs://b/job/checkpoints/", "AIP_MODEL_DIR": "gs://b/job/model/",
       "AIP_TENSORBOARD_LOG_DIR": "gs://b/job/logs/"}  # fmt: skip


def test_the_parent_of_the_checkpoints_is_model_dir():
    directories = read_directories("", AIP)
    assert (directories.model_dir, directories.logs, directories.model) == (
        "gs://b/job",
        "",
        "gs://b/job/model",
    )
    assert read_directories("", {}) == Directories()
    other_variables = AIP | {"AIP_CHECKPOINT_DIR": "gs://b/ckpt/", "AIP_TENSORBOARD_LOG_DIR": "gs://c/x"}
    assert read_directories("", other_variables).model_dir == "gs://b/ckpt"
    assert read_directories("", other_variables).logs == "gs://c/x"


def test_a_flag_overrides_the_checkpoints_directory_only():
    directories = read_directories("/runs/a", AIP)
    assert (directories.model_dir, directories.logs) == ("/runs/a", "gs://b/job/logs")
    assert directories.model == "gs://b/job/model"
    assert "AIP_CHECKPOINT_DIR" not in directories.sources


def test_a_bucket_has_two_names_and_the_usable_one_is_used(tmp_path):
    mount = str(tmp_path / "gcs")
    (tmp_path / "gcs" / "here").mkdir(parents=True)
    assert usable_path("gs://here/run/a", mount) == f"{mount}/here/run/a"
    assert usable_path(f"{mount}/here/run/a", mount) == f"{mount}/here/run/a"
    assert usable_path("gs://there/run", mount) == "gs://there/run"
    assert usable_path(f"{mount}/there/run", mount) == "gs://there/run"
    for other in ("", "/runs/a", "s3://here/a", "relative/gs", mount):
        assert usable_path(other, mount) == other
    directories = read_directories("", {k: v.replace("//b/", "//here/") for k, v in AIP.items()}, mount)
    job = f"{mount}/here/job"
    assert directories == Directories(job, "", f"{job}/model", directories.sources)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_newest_metrics_are_written_as_text_for_a_tuning_job(tmp_path):
    path = tmp_path / "new" / "output.metrics"
    writer = HypertuneWriter(
        "accuracy", {"CLOUD_ML_HP_METRIC_FILE": str(path), "CLOUD_ML_TRIAL_ID": "7"}, lambda: 5.0
    )
    writer.write(10, {"accuracy": 0.1})  # a training metric
    assert not path.exists()
    for step in range(150):
        writer.write(step, {"accuracy": step / 200, "loss": 1.0}, "eval")
    assert len(lines(path)) == 100
    assert lines(path)[-1] == {
        "timestamp": 5.0, "trial": "7", "accuracy": "0.745", "global_step": "149",
        "checkpoint_path": "",
    }  # fmt: skip


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_the_exported_model_replaces_an_older_one(tmp_path, scheme):
    for subdirectory, names in (("run/export/saved_model", ("saved_model.pb", "variables/new")),
                                ("model", ("saved_model.pb", "variables/old"))):  # fmt: skip
        for name in names:
            (tmp_path / subdirectory / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / subdirectory / name).write_text(f"{subdirectory} {name}")
    model_dir = f"{scheme}{tmp_path}/run"
    hand_over(model_dir, Directories(model=f"{scheme}{tmp_path}/model"), ("saved_model",), is_chief=True)
    assert {str(p.relative_to(tmp_path / "model")) for p in (tmp_path / "model").rglob("*")} == {
        "saved_model.pb", "variables", "variables/new",
    }  # fmt: skip
    assert (tmp_path / "model/saved_model.pb").read_text().startswith("run/export")
    (tmp_path / "file").touch()
    with pytest.raises(CtlError, match="could not be copied to .*/file/m.*Copy it yourself, or set"):
        hand_over(model_dir, Directories(model=f"{tmp_path}/file/m"), ("saved_model",), is_chief=True)


def mnist(directory, *arguments, **environ):
    return processes.run(
        [sys.executable, "-m", "models.mnist", "--train_steps=4", "--global_batch_size=32", *arguments],
        env=environment(**environ, CLOUD_ML_HP_METRIC_FILE=str(directory / "metrics")), cwd=ROOT,
    )  # fmt: skip


@pytest.mark.workers
def test_a_run_without_model_dir_uses_the_directories_of_the_platform(tmp_path):
    variables = {k: v.replace("gs://b", str(tmp_path)) for k, v in AIP.items()}
    variables["AIP_TENSORBOARD_LOG_DIR"] = str(tmp_path / "board")
    result = mnist(tmp_path, "--report_hypertune=accuracy", **variables)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "job/checkpoints/ckpt-4").is_dir()
    assert (tmp_path / "job/model/saved_model.pb").is_file()
    assert (tmp_path / "board/eval").is_dir() and not (tmp_path / "job/logs").exists()
    assert f"--logdir {tmp_path}/board" in result.stdout
    [row] = lines(tmp_path / "metrics")
    [evaluated] = [r for r in lines(tmp_path / "job/metrics.jsonl") if r["run"] == "eval"]
    assert float(row["accuracy"]) == evaluated["accuracy"] and row["global_step"] == "4"


@pytest.mark.workers
def test_the_metric_for_tuning_must_be_one_of_an_evaluation(tmp_path):
    result = mnist(tmp_path, "--report_hypertune=accuracy", "--mode=train")
    assert result.returncode == 2 and "requires evaluations" in result.stderr
    result = mnist(tmp_path, "--report_hypertune=acuracy", "--eval_every_steps=2")
    assert result.returncode == 2 and "eval_step returns accuracy, loss" in result.stderr


@pytest.mark.workers
@pytest.mark.parametrize(("model", "error_message"), [
    ("run/model", "there is no model_dir"), ("file/model", "the model cannot be written"),
])  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_before_training(tmp_path, model, error_message):
    (tmp_path / "file").touch()
    flags = [] if model.startswith("run") else [f"--model_dir={tmp_path}/m"]
    result = mnist(tmp_path, *flags, AIP_MODEL_DIR=f"{tmp_path}/{model}")
    assert result.returncode == 2 and error_message in result.stderr and "step 4" not in result.stdout
