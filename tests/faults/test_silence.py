"""A stopped worker that has not ended: the other workers report it as lost after the configured timeout."""

import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, TIMEOUT_SECS, environment, free_ports
from polling import wait_until

pytestmark = pytest.mark.workers


@pytest.fixture
def workers(tmp_path):
    """Returns workers(arguments) -> two training processes of models.mnist, and their logs."""
    started = []

    def start(*arguments):
        addresses = [f"127.0.0.1:{p}" for p in free_ports(2)]
        logs = [tmp_path / f"{i}.log" for i in range(2)]
        for i, log in enumerate(logs):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
            with log.open("wb") as file:
                started.append(subprocess.Popen(  # TensorFlow aborts some forked processes
                    [sys.executable, "-m", "models.mnist", "--train_steps=100000", "--export=none",
                     "--global_batch_size=8", "--log_every_steps=10", *arguments],
                    stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                    env=environment(TF_CONFIG=json.dumps(config)),
                ))  # fmt: skip
        wait_until(lambda: "step 20/" in logs[0].read_text(), started[0], show=logs[0].read_text)
        return started, logs

    yield start
    for process in started:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait(TIMEOUT_SECS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--communication=ring", "--heartbeat_secs=8"], "unhealthy", marks=pytest.mark.slow),
        (["--communication=tcp", "--heartbeat_secs=8"], "silent for"),
        pytest.param(
            ["--communication=tcp", "--collective_timeout_secs=8", "--heartbeat_secs=100"],
            "--collective_timeout_secs",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ring", "tcp", "timeout"],
)
def test_a_silent_worker_is_given_up(workers, arguments, message):
    (first, second), logs = workers(*arguments)
    second.send_signal(signal.SIGSTOP)
    code = first.wait(TIMEOUT_SECS)
    text = logs[0].read_text()
    assert code == 134, text[-2000:]
    assert "has ended or cannot be reached" in text and message in text
