"""A worker that is lost before the first step: the other one ends with the exit code of a retry."""

import json
import subprocess

import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment, free_ports
from training import command

pytestmark = pytest.mark.workers
SLOW_CASES = [
    pytest.param(phase, worker, marks=pytest.mark.slow)
    for phase, worker in [("data", 1), ("trace", 1), ("build", 0), ("eval_data", 1)]
]


@pytest.mark.parametrize(
    ("phase", "lost"), [("build", 1), ("eval_trace", 1), ("choice", 1), ("choice", 0), *SLOW_CASES]
)
def test_the_other_worker_can_be_retried(phase, lost, tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    arguments = command(tmp_path / "run", "--mode=train_and_eval", "--heartbeat_secs=5")
    jobs, logs = [], [tmp_path / f"worker_{index}.log" for index in (0, 1)]
    try:
        for index, log in enumerate(logs):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            variables = environment(
                TF_CONFIG=json.dumps(config), FAULTS=f"kill@{phase}:{lost}", FAULTS_DIR=str(tmp_path),
                EVALUATES="1",
            )  # fmt: skip
            with log.open("wb") as file:
                jobs.append(
                    processes.start(
                        arguments, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=variables
                    )
                )
        codes = [job.wait(TIMEOUT_SECS) for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    output = logs[1 - lost].read_text()
    assert codes[lost] == -9 and codes[1 - lost] == 134, output[-3000:]
    assert "Traceback" not in output
