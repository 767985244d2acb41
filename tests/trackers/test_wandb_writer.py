"""Runs of W&B in offline mode, read from its files."""

import os
from unittest import mock

import ctl
import numpy as np
import pytest
from conftest import PROGRAMS
from fitting import classifier

pytest.importorskip("wandb.proto", reason="W&B is not installed: pip install 'tf-ctl[wandb]'")
import wandb_runs

pytestmark = pytest.mark.slow
OPTIONS = ("--global_batch_size=12", "--steps_per_loop=1", "--log_every_steps=10", "--writers=wandb")
OFFLINE = {"WANDB_MODE": "offline"}


def train(run_program, tmp_path, *options, count=1, **variables):
    command = [str(PROGRAMS / "tracking.py"), f"--model_dir={tmp_path}/run", *OPTIONS, *options]
    return run_program(count, command, fresh=True, **{**OFFLINE, **variables})


def runs_of(directory):
    return [wandb_runs.read_run(path) for path in sorted(directory.rglob("*.wandb"))]


def test_a_run_has_configuration_metrics_of_all_sets_exports_and_a_status(run_program, tmp_path):
    results = train(run_program, tmp_path, "--train_steps=20", "--learning_rate=0.05", count=2)
    assert [result.code for result in results] == [0, 0], results[0].output
    (run,) = runs_of(tmp_path / "run")
    run_id = (tmp_path / "run" / "run_id").read_text().strip()
    ((identifier, group, name),) = run["ids"]
    assert (identifier, group, run["project"]) == (run_id, run_id, "Tracked")
    assert name.startswith("learning_rate=0.05,")
    assert run["config"]["learning_rate"] == 0.05 and run["config"]["workers"] == 2
    assert [row["step"] for row in run["rows"] if "train/loss" in row] == [10, 20]
    of_sets = {"eval/clean/loss", "eval/noisy/loss"}
    assert [row["step"] for row in run["rows"] if of_sets <= row.keys()] == [20]
    assert (run["summary"]["status"], run["exit_code"]) == ("done", 0)
    (files,) = run["artifacts"].values()
    assert "model.keras" in files and "saved_model/saved_model.pb" in files


@pytest.mark.parametrize(
    ("variables", "code", "status", "error", "exit_code"),
    [
        ({"FAIL_AT": "20"}, 1, "failed", "ValueError: bad batch", 1),
        ({"SIGTERM_AT": "20"}, 143, "stopped", "", 143),
    ],
)
def test_a_resumed_run_has_the_identifier_of_the_run_that_failed_or_was_stopped(
    variables, code, status, error, exit_code, run_program, tmp_path
):
    options = ("--train_steps=40", "--export=none", "--save_every_steps=10")
    results = train(run_program, tmp_path, *options, **variables)
    assert results[0].code == code, results[0].output
    results = train(run_program, tmp_path, *options)
    assert results[0].code == 0, results[0].output
    first, second = runs_of(tmp_path / "run")
    assert first["ids"] == second["ids"]
    assert (first["summary"]["status"], first["summary"]["error"]) == (status, error)
    assert first["exit_code"] == exit_code and second["summary"]["status"] == "done"


@pytest.mark.parametrize("variables", [{"WANDB_API_KEY": "", "NETRC": "/nowhere"}])
def test_a_missing_key_is_refused_before_the_first_step(variables, run_program, tmp_path):
    results = train(run_program, tmp_path, "--train_steps=20", WANDB_MODE="online", **variables)
    assert results[0].code == 2 and "W&B has no API key" in results[0].output


def test_a_server_that_is_away_is_one_warning_and_delays_no_end(run_program, tmp_path):
    away = {"WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    results = train(run_program, tmp_path, "--train_steps=20", "--export=none", **away)
    assert results[0].code == 0, results[0].output
    assert results[0].output.count("W&B failed") == 1


def test_fit_writes_each_epoch(tmp_path):
    x, y = np.zeros((64, 6), np.float32), np.zeros(64, np.int64)
    options = {"verbose": 0, "model_dir": str(tmp_path / "run")}
    with mock.patch.dict(os.environ, OFFLINE):
        options["extra_writers"] = [ctl.WandbWriter("fits")]
        ctl.fit(classifier(), x, y, epochs=2, **options)
    (run,) = runs_of(tmp_path / "run")
    assert run["project"] == "fits" and [row["step"] for row in run["rows"]] == [2, 4]
