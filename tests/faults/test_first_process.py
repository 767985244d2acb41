"""Signals and orphans where Python is the first process of a container (PID 1), and Ctrl-C in imports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT_SECS, environment
from polling import wait_until

pytestmark = pytest.mark.workers
FIRST = ["unshare", "--pid", "--fork", "--mount-proc"]


def can_unshare():
    try:
        return not subprocess.run([*FIRST, "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


needs_first = pytest.mark.skipif(not can_unshare(), reason="cannot start the first process of a namespace")
SLOW_MODULE = """
import sys, time
print("importing", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until: time.sleep(0.01)
"""


def restore_sigint():
    """Restores the default of SIGINT, which is ignored if a shell runs the tests in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(tmp_path, *inside, program="import ctl\nimport slow_module\n", arguments=()):
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    (tmp_path / "program.py").write_text(program)
    return subprocess.Popen(
        [*inside, sys.executable, str(tmp_path / "program.py"), *arguments], env=environment(), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=restore_sigint,  # noqa: PLW1509
    )  # fmt: skip


def first_pid(process):
    [pid] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    return pid


@needs_first
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_imports_ends_the_first_process_of_a_container(tmp_path, signum):
    process = started(tmp_path, *FIRST)
    try:
        assert process.stdout.readline() == "importing\n", process.stderr.read()
        os.kill(first_pid(process), signum)
        err = process.communicate(timeout=TIMEOUT_SECS)[1]
    finally:
        process.kill()
    assert process.returncode == 143
    assert err == f"Stopped by {signal.Signals(signum).name}; no step was under way.\n"


@needs_first
def test_the_signal_is_reported_also_while_tensorflow_s_output_is_held_back(tmp_path):
    """The import is slow, and its stderr is filtered."""
    program = (
        "import ctl\nfrom ctl.io import log_filter\nwith log_filter.quiet():\n    import slow_module\n"
    )
    process = started(tmp_path, *FIRST, program=program)
    try:
        assert process.stdout.readline() == "importing\n", process.stderr.read()
        os.kill(first_pid(process), signal.SIGTERM)
        err = process.communicate(timeout=TIMEOUT_SECS)[1]
    finally:
        process.kill()
    assert (process.returncode, err) == (143, "Stopped by SIGTERM; no step was under way.\n")


def test_ctrl_c_during_imports_is_one_line(tmp_path):
    process = started(tmp_path)
    try:
        assert process.stdout.readline() == "importing\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=TIMEOUT_SECS)[1]
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT  # 130 for a shell
    assert err == "Stopped by Ctrl-C during an import; no step was under way.\n"


def test_ctrl_c_outside_imports_is_left_to_the_program(tmp_path):
    program = "import time\nimport ctl\nprint('importing', flush=True)\ntime.sleep(60)\n"
    process = started(tmp_path, program=program)
    try:
        assert process.stdout.readline() == "importing\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=TIMEOUT_SECS)[1]
    finally:
        process.kill()
    assert "KeyboardInterrupt" in err and "Stopped by" not in err


ORPHANS = """
import os, pathlib, subprocess, sys, time
for _ in range(20):
    # a grandchild in a session of its own, whose parent ends first
    subprocess.run([sys.executable, "-S", "-c", "import os; os.fork() or os.setsid()"], check=True)

def zombies():
    states = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try: states.append(path.read_text().rpartition(")")[2].split()[:2])
        except OSError: pass
    return states.count(["Z", "1"])

print("zombies", zombies(), flush=True)
until = time.monotonic() + 600
while zombies():
    if time.monotonic() > until: sys.exit("zombies remain")
    time.sleep(0.05)
"""


@needs_first
def test_a_launcher_that_is_the_first_process_reaps_orphans(tmp_path):
    (tmp_path / "orphans.py").write_text(ORPHANS)
    command = [*FIRST, sys.executable, "-m", "ctl", "launch", f"--log_dir={tmp_path / 'logs'}", "--"]
    result = subprocess.run(
        [*command, sys.executable, str(tmp_path / "orphans.py")], env=environment(), cwd=ROOT,
        capture_output=True, text=True, timeout=2 * TIMEOUT_SECS, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


@needs_first
def test_a_launcher_that_is_the_first_process_passes_sigterm_on(tmp_path):
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("importing", flush=True)
time.sleep(60)
"""
    (tmp_path / "worker.py").write_text(program)
    command = [*FIRST, sys.executable, "-m", "ctl", "launch", f"--log_dir={tmp_path / 'logs'}", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, str(tmp_path / "worker.py")], env=environment(), cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        log = tmp_path / "logs" / "job_0.log"
        wait_until(lambda: log.exists() and "importing\n" in log.read_text())
        os.kill(first_pid(process), signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_SECS)
    finally:
        process.kill()
    assert process.returncode == 143
