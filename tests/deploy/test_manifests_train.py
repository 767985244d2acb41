"""Processes of each manifest on the loopback device: training of flowers with an evaluator."""

import json
import subprocess
import sys
import time

import photos as sample
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment, free_ports
from platforms import ALL, ENDS_WITH_CHIEF, on_loopback
from processes import start

pytestmark = pytest.mark.workers
STEPS = 20
WAITING_MESSAGE = "Waiting for the evaluator"
SLOW_CASES = ("vertex_by_cluster_spec", "kubernetes", "trainjob", "tfjob")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sample.make(tmp_path_factory.mktemp("photos"), per_class=12, height=60, width=80)


def started(processes, tmp_path, platform):
    """Starts the processes. Returns them by role, with their log files.

    If the platform ends all processes with the chief, the evaluator starts when the chief waits for it.
    """
    running, logs = {}, {}
    for process in processes:
        while process.role == "evaluator" and platform in ENDS_WITH_CHIEF:
            if (
                WAITING_MESSAGE in logs["chief"].read_text(errors="replace")
                or running["chief"].poll() is not None
            ):
                break
            time.sleep(0.05)
        logs[process.role] = tmp_path / f"{process.role}.log"
        command = [sys.executable if w == "python" else w for w in process.command]
        with logs[process.role].open("wb") as log:
            running[process.role] = start(
                command, cwd=ROOT, env=environment() | process.environ, stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
    return running, logs


def ended(running, platform):
    """Returns the exit codes. The platform ends all processes with the chief, or waits for each."""
    try:
        codes = {"chief": running["chief"].wait(TIMEOUT_SECS)}
        if platform in ENDS_WITH_CHIEF:
            time.sleep(1)  # processes that have completed may end
            for process in running.values():
                process.terminate()
        else:
            codes |= {role: process.wait(TIMEOUT_SECS) for role, process in running.items()}
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
    return codes


@pytest.mark.parametrize("platform", [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_CASES else []) for name in ALL
])  # fmt: skip
def test_chief_worker_and_evaluator_train_flowers(platform, folder, tmp_path):
    processes = ALL[platform]([
        "python", "-m", "models.flowers", f"--data_dir={folder}", f"--train_steps={STEPS}",
        "--image_size=24", "--batch_size_per_replica=4", "--save_every_steps=10", "--cache=none",
    ], str(tmp_path))  # fmt: skip
    assert [p.role for p in processes] == ["chief", "worker", "evaluator"]
    ports = iter(free_ports(6))
    on_loopback(processes, lambda: next(ports))
    running, logs = started(processes, tmp_path, platform)
    codes = ended(running, platform)
    output_by_role = {role: log.read_text(errors="replace") for role, log in logs.items()}
    assert set(codes.values()) == {0}, (
        codes,
        {role: text[-2000:] for role, text in output_by_role.items()},
    )
    job = tmp_path / "job"
    assert (
        f"done at step {STEPS}" in output_by_role["chief"]
        and "2 workers, 2 replicas" in output_by_role["chief"]
    )
    assert sorted(p.name for p in (job / "checkpoints").glob("ckpt-*")) == ["ckpt-10", "ckpt-20"]
    evaluated = json.loads((job / "evaluated.json").read_text())["evaluated"]
    assert set(evaluated) == {"10", "20"}
    assert not list(job.rglob("workertemp*"))
    assert (job / "export/saved_model/saved_model.pb").is_file()
    assert (job / "model/saved_model.pb").is_file() == platform.startswith("vertex")
    assert (WAITING_MESSAGE in output_by_role["chief"]) == (platform in ENDS_WITH_CHIEF)
