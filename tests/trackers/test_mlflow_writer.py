"""Runs in a local store of MLflow, read with its own client."""

import os
import sys
from unittest import mock

import ctl
import numpy as np
import processes
import pytest
from conftest import PROGRAMS, TIMEOUT_SECS, environment
from fitting import classifier

pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'tf-ctl[mlflow]'")
pytestmark = pytest.mark.slow
OPTIONS = ("--global_batch_size=12", "--steps_per_loop=1", "--log_every_steps=10", "--writers=mlflow")


@pytest.fixture
def store(tmp_path):
    """The address of a store, as environment variables of programs and of this process."""
    variables = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/store", "MLFLOW_ALLOW_FILE_STORE": "true"}
    with mock.patch.dict(os.environ, {**variables, "MLFLOW_DISABLE_TELEMETRY": "true"}):
        yield variables


@pytest.fixture
def client(store):
    import mlflow

    return mlflow.MlflowClient(tracking_uri=store["MLFLOW_TRACKING_URI"])


def runs_of(client, experiment="Tracked"):
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def steps_of(client, run, name):
    return [metric.step for metric in client.get_metric_history(run.info.run_id, name)]


def train(run_program, tmp_path, store, *options, count=1, **variables):
    command = [str(PROGRAMS / "tracking.py"), f"--model_dir={tmp_path}/run", *OPTIONS, *options]
    return run_program(count, command, **store, **variables)


def test_a_run_has_parameters_metrics_of_all_sets_exports_and_a_status(
    run_program, tmp_path, store, client
):
    results = train(run_program, tmp_path, store, "--train_steps=20", "--learning_rate=0.05")
    assert results[0].code == 0, results[0].output
    (run,) = runs_of(client)
    assert run.info.status == "FINISHED" and run.info.run_name.startswith("learning_rate=0.05,")
    assert run.data.params["learning_rate"] == "0.05" and run.data.params["global_batch_size"] == "12"
    assert {"train/loss", "eval/clean/loss", "eval/noisy/loss"} <= run.data.metrics.keys()
    assert steps_of(client, run, "train/loss") == [10, 20]
    assert steps_of(client, run, "eval/clean/loss") == [20]
    assert run.data.tags["ctl.run_id"] == (tmp_path / "run" / "run_id").read_text().strip()
    assert run.data.tags["ctl.status"] == "done"
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id, "export")}
    assert artifacts == {"export/model.keras", "export/saved_model"}


def test_the_chief_of_two_workers_writes_one_run(run_program, tmp_path, store, client):
    results = train(run_program, tmp_path, store, "--train_steps=20", "--export=none", count=2)
    assert [result.code for result in results] == [0, 0], results[0].output
    (run,) = runs_of(client)
    assert run.info.status == "FINISHED" and run.data.params["workers"] == "2"
    assert steps_of(client, run, "train/loss") == [10, 20]


def test_chief_and_evaluator_of_a_job_with_parameter_servers_write_one_run(tmp_path, store, client):
    completed = processes.run(
        [sys.executable, "-m", "ctl", "launch", "--workers=1", "--ps=1", "--chief", "--evaluator", "--",
         sys.executable, str(PROGRAMS / "tracking.py"), f"--model_dir={tmp_path}/run", *OPTIONS,
         "--train_steps=40", "--export=none", "--save_every_steps=20"],
        env=environment(**store), timeout=TIMEOUT_SECS,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-2000:]
    (run,) = runs_of(client)
    assert run.info.status == "FINISHED" and run.data.tags["ctl.status"] == "done"
    assert steps_of(client, run, "train/loss") == [10, 20, 30, 40]
    assert steps_of(client, run, "eval/noisy/loss")[-1] == 40


def test_a_database_of_sqlite_is_a_store(run_program, tmp_path):
    pytest.importorskip("sqlalchemy", reason="part of the package mlflow, not of mlflow-skinny")
    import mlflow

    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db", "MLFLOW_DISABLE_TELEMETRY": "true"}
    results = train(run_program, tmp_path, store, "--train_steps=20", "--export=none")
    assert results[0].code == 0, results[0].output
    client = mlflow.MlflowClient(tracking_uri=store["MLFLOW_TRACKING_URI"])
    (run,) = runs_of(client)
    assert run.info.status == "FINISHED" and steps_of(client, run, "train/loss") == [10, 20]


@pytest.mark.parametrize(
    ("variables", "code", "status", "error"),
    [
        ({"FAIL_AT": "20"}, 1, ("FAILED", "failed"), "ValueError: bad batch"),
        ({"SIGTERM_AT": "20"}, 143, ("KILLED", "stopped"), None),
    ],
)
def test_a_resumed_run_continues_the_run_that_failed_or_was_stopped(
    variables, code, status, error, run_program, tmp_path, store, client
):
    options = ("--train_steps=40", "--export=none", "--save_every_steps=10")
    results = train(run_program, tmp_path, store, *options, **variables)
    assert results[0].code == code, results[0].output
    (run,) = runs_of(client)
    assert (run.info.status, run.data.tags["ctl.status"]) == status
    assert run.data.tags.get("ctl.error") == error
    results = train(run_program, tmp_path, store, *options, "--log_every_steps=20")
    assert results[0].code == 0, results[0].output
    (resumed,) = runs_of(client)
    assert resumed.info.run_id == run.info.run_id and resumed.info.status == "FINISHED"
    assert resumed.data.tags["ctl.status"] == "done" and "ctl.error" not in resumed.data.tags
    assert resumed.data.params["log_every"] == run.data.params["log_every"]  # MLflow changes no parameter
    assert "resumed.log_every" in resumed.data.tags
    assert max(steps_of(client, resumed, "train/loss")) == 40


def test_an_evaluation_alone_adds_metrics_to_the_run_and_keeps_its_status(
    run_program, tmp_path, store, client
):
    options = ("--train_steps=20", "--export=none", "--save_every_steps=20")
    assert train(run_program, tmp_path, store, *options, FAIL_AT="20")[0].code == 1
    results = train(run_program, tmp_path, store, "--mode=eval")
    assert results[0].code == 0, results[0].output
    (run,) = runs_of(client)
    assert run.info.status == "FAILED" and "eval/clean/loss" in run.data.metrics


def test_a_server_that_is_away_is_one_warning(run_program, tmp_path, store):
    away = {**store, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    results = train(run_program, tmp_path, away, "--train_steps=20", "--export=none")
    assert results[0].code == 0, results[0].output
    assert results[0].output.count("MLflow failed") == results[0].output.count("127.0.0.1:9/") == 1
    assert (tmp_path / "run" / "checkpoints" / "ckpt-20").is_dir()


def test_a_store_that_mlflow_cannot_open_is_refused_before_the_first_step(run_program, tmp_path, store):
    other = {**store, "MLFLOW_TRACKING_URI": "ftp://nowhere"}
    results = train(run_program, tmp_path, other, "--train_steps=20")
    assert results[0].code == 2
    assert "MLflow cannot open the tracking URI 'ftp://nowhere'" in results[0].output


def test_fit_writes_each_epoch_and_the_values_of_a_history_stay(tmp_path, store, client):
    x, y = np.zeros((64, 6), np.float32), np.zeros(64, np.int64)
    writer = ctl.MlflowWriter("fits")
    history = ctl.fit(classifier(), x, y, epochs=2, verbose=0, extra_writers=[writer])
    ctl.fit(classifier(), x, y, epochs=1, verbose=0, extra_writers=[writer])
    second, first = runs_of(client, "fits")
    assert first.info.run_id != second.info.run_id
    assert [run.info.status for run in (first, second)] == ["FINISHED", "FINISHED"]
    assert steps_of(client, first, "train/loss") == [2, 4] and len(history.history["loss"]) == 2


def test_names_and_values_that_mlflow_refuses_are_adapted(store, client):
    from ctl.metrics.protocol import Ended, RunEnd, RunInfo, Started

    hparams = {"a*b": "v" * 9000}
    info = RunInfo("Odd", "default", 1, 1, 8, "", "float32", 0, None, hparams=hparams, run_id="b2")
    writer = ctl.MlflowWriter()
    writer.note(Started(0, 2, info))
    writer.write(1, {"top@1": float("nan"), "lr (max)": 0.5})
    writer.note(Ended(1, RunEnd.DONE))
    (run,) = runs_of(client, "Odd")
    assert run.data.params == {"a_b": "v" * 500}
    assert set(run.data.metrics) == {"train/top_1", "train/lr _max_"}
