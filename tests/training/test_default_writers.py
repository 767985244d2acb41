"""Default metric writers of a run, an evaluator and `ctl.fit`."""

import ctl
import numpy as np
import pytest
from ctl.training.default_writers import default_writers
from fitting import classifier
from small_models import Small
from tensorboard_runs import scalar_steps


@pytest.mark.parametrize(
    ("model_dir", "options", "classes"),
    [
        (None, {}, ["ConsoleWriter"]),
        ("run", {}, ["ConsoleWriter", "JsonlWriter", "TensorBoardWriter"]),
        ("run", {"console": False}, ["JsonlWriter", "TensorBoardWriter"]),
        ("gs://bucket/run", {}, ["ConsoleWriter", "TensorBoardWriter"]),
    ],
)
def test_json_lines_are_written_in_a_local_model_dir_only(model_dir, options, classes, tmp_path, caplog):
    directory = str(tmp_path / model_dir) if model_dir == "run" else model_dir
    writers = default_writers(directory, f"{directory}/logs", metrics_file="numbers.jsonl", **options)
    assert [type(writer).__name__ for writer in writers] == classes
    assert ("numbers.jsonl is not written" in caplog.text) == (
        model_dir is not None and "://" in model_dir
    )


def test_the_metrics_file_has_the_given_name(tmp_path):
    options = {"metrics_file": "numbers.jsonl", "console": False}
    for writer in default_writers(str(tmp_path), str(tmp_path / "logs"), **options):
        writer.write(1, {"loss": 2.0})
    assert '"loss": 2.0' in (tmp_path / "numbers.jsonl").read_text()


@pytest.mark.parametrize("scheme", ["file://", ""])
def test_fit_and_train_write_the_same_files(scheme, tmp_path, monkeypatch):
    """At a URL both write no JSON lines and create no directory with the name of the URL."""
    monkeypatch.chdir(tmp_path)
    x, y = np.zeros((8, 6), np.float32), np.zeros(8, np.int64)
    ctl.fit(classifier(), x, y, verbose=0, model_dir=f"{scheme}{tmp_path}/fit")
    Small(strategy="default", model_dir=f"{scheme}{tmp_path}/train").train(1)
    file_names = [sorted(p.name for p in (tmp_path / run).iterdir()) for run in ("fit", "train")]
    assert file_names[0] == file_names[1] and ("metrics.jsonl" in file_names[0]) == (not scheme)
    assert scalar_steps(tmp_path / "fit" / "logs" / "train") and (tmp_path / "train" / "logs").is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fit", "train"]
