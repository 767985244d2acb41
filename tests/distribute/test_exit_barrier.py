"""Exit of the chief after all workers: TensorFlow reports a later worker as crashed."""

import json
import socket
import subprocess
import sys

import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment, free_ports
from polling import wait_until

EXITING_PROGRAM = """
from ctl.distribute.platforms import detection
from ctl.distribute import exit_barrier
from ctl.io import exit_hook
exit_barrier.arm(detection.read_topology())
raise exit_hook.Exit(0)
"""


def start_exiting_process(task_type: str, chief: str, worker: str) -> subprocess.Popen:
    cluster = {"chief": [chief], "worker": [worker]}
    config = json.dumps({"cluster": cluster, "task": {"type": task_type, "index": 0}})
    return subprocess.Popen([sys.executable, "-c", EXITING_PROGRAM], env=environment(TF_CONFIG=config))


def test_the_chief_waits_while_another_worker_takes_connections():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        def has_connection():
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        listening, unused = (f"127.0.0.1:{p}" for p in (server.getsockname()[1], free_ports(1)[0]))
        assert start_exiting_process("worker", chief=listening, worker=unused).wait(TIMEOUT_SECS) == 0
        assert not has_connection(), "workers do not wait for the chief"
        chief = start_exiting_process("chief", chief=unused, worker=listening)
        for _ in range(3):
            wait_until(has_connection, chief)
    assert chief.wait(TIMEOUT_SECS) == 0


TRAINING_PROGRAM = """
import atexit, os, pathlib, time
from ctl.distribute.platforms import detection
left = pathlib.Path(os.environ["LEFT"])

def leave():
    if detection.read_topology().is_chief: print("the other left before:", left.exists(), flush=True)
    else: time.sleep(2); left.touch()

atexit.register(leave)                   # registered first, so it runs last
import ctl, evaluating
ctl.run(evaluating.Job)
"""


@pytest.mark.workers
def test_workers_that_have_trained_leave_before_the_chief(tmp_path):
    command = [sys.executable, "-m", "ctl.launch", "--workers=2", "--",
               sys.executable, "-c", TRAINING_PROGRAM, f"--model_dir={tmp_path / 'run'}", "--train_steps=2",
               "--global_batch_size=8", "--export=none"]  # fmt: skip
    result = processes.run(
        command, env=environment(LEFT=str(tmp_path / "left")), cwd=ROOT,
        timeout=TIMEOUT_SECS,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "the other left before: True" in result.stdout
