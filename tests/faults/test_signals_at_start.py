"""A signal before the first step ends the process within seconds, with 143 or 130, without a save.

TensorFlow's multi-worker runtime intercepts SIGTERM after the strategy is created.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROGRAMS, ROOT, TIMEOUT_SECS, environment, free_ports
from polling import wait_until
from training import output_of, run, saved, started

pytestmark = pytest.mark.workers
NO_STEP_MESSAGE = "no step was under way."


def single_worker_config() -> str:
    """Returns a TF_CONFIG of one worker, with which TensorFlow handles SIGTERM itself."""
    cluster = {"worker": [f"127.0.0.1:{free_ports(1)[0]}"]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize("fault_position", ["init", "build", "data", "trace"])
@pytest.mark.parametrize(
    ("action", "code"), [("term", 143), pytest.param("int", 130, marks=pytest.mark.slow)]
)
def test_a_signal_before_the_first_step_ends_the_process_at_once(tmp_path, fault_position, action, code):
    options = ["--strategy=multi_worker", "--train_steps=2"]
    result = run(
        tmp_path / "run", *options, faults=f"{action}@{fault_position}", TF_CONFIG=single_worker_config()
    )
    assert (result.code, result.output.count(NO_STEP_MESSAGE)) == (code, 1), result.output[-2000:]
    assert f"fault: {action} at {fault_position}" in result.output and "Traceback" not in result.output
    assert saved(tmp_path / "run") == []
    if fault_position == "trace":  # it held the LOCK by then
        assert json.loads((tmp_path / "run" / "LOCK").read_text())["state"] == "ended"


def test_sigterm_to_the_launcher_while_workers_build_ends_them_all(tmp_path):
    with started(tmp_path / "run", workers=2, faults="hang@build:1") as process:
        wait_until(lambda: "hang at build" in worker_log(tmp_path), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_SECS) == 143
    assert "SIGKILL" not in output_of(tmp_path / "run").read_text().replace("sending SIGKILL after", "")
    assert NO_STEP_MESSAGE in worker_log(tmp_path)


def worker_log(tmp_path) -> str:
    path = tmp_path / "run" / "workers" / "job_1.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_while_tensorflow_waits_for_a_peer_ends_the_process_and_it_beats_until_then(
    tmp_path, signum
):
    """The peer has answered, and is gone before TensorFlow connects."""
    cluster = {"worker": [f"127.0.0.1:{p}" for p in free_ports(2)]}
    command, beat = [sys.executable, str(PROGRAMS / "meets_and_leaves.py"), "1", "120"], tmp_path / "beat"
    waits, leaves = (
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment(
                CTL_HEARTBEAT=str(beat) if i == 0 else str(tmp_path / "other"),
                TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}}),
            ),
        )
        for i in range(2)
    )  # fmt: skip
    try:
        assert leaves.wait(TIMEOUT_SECS) == 0
        for _ in range(4):  # a beat a second
            last = beat.read_text()
            wait_until(lambda before=last: beat.read_text() != before, waits)
        waits.send_signal(signum)
        assert waits.wait(TIMEOUT_SECS) == -signum
    finally:
        for process in (waits, leaves):
            process.kill()
            process.wait(TIMEOUT_SECS)


NATIVE = """
import ctypes, resource, signal
files = []
if {many_files}:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [open("/dev/null") for _ in range(1100)]
from ctl.supervision import signals
library = ctypes.CDLL(None)
library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
with signals.immediate_exit(), signals.default_action():
    library.signal(signal.SIGTERM, 1)     # SIG_IGN: what TensorFlow's handler comes to
    print("waiting", flush=True)
    library.sleep(100)
"""


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("first", "many_files"),
    [(False, False), (True, False), (True, True)],
    ids=["a process", "the first of a container", "with many open files"],
)
def test_native_code_that_takes_the_signal_does_not_keep_it(first, many_files):
    """The kernel ignores a default action for the first process of a container."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc"] if first else []
    if first and subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no process of our own can be the first of its namespace here")
    if many_files and resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000:
        pytest.skip("a process cannot open 1,100 files here")
    process = subprocess.Popen(
        [*inside, sys.executable, "-c", NATIVE.replace("{many_files}", str(many_files))],
        env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "waiting\n", process.stderr.read()
        pid = process.pid
        if first:
            [pid] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        wait_until(lambda: not ignores_sigterm(pid), process)  # milliseconds
        os.kill(pid, signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_SECS)
    finally:
        process.kill()
    assert process.returncode == (143 if first else -signal.SIGTERM)
