"""Jobs for tests of the launcher. Small Python programs replace the workers.

Each worker has `role`, `index`, `job` (the number of its log, if it trains) and `wait_for(condition)`,
and writes its log by printing.
"""

import json
import os
import re
import select
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from polling import wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_SECS = 600

WORKER = """
import json, os, pathlib, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])
role, index = task["task"]["type"], task["task"]["index"]
job = index + len(task["cluster"].get("chief", [])) * (role == "worker")
here = pathlib.Path(os.environ["TEST_DIR"])

def wait_for(condition):
    until = time.monotonic() + 600
    while not condition():
        if time.monotonic() > until:
            sys.exit("waited in vain")
        time.sleep(0.01)

def leave_pid(path):
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)

def wait_for_end_of(path):
    "Waits until the launcher has reaped the process that wrote its pid."
    def is_gone():
        try: os.kill(int(path.read_text()), 0)
        except ProcessLookupError: return True
    wait_for(path.exists)
    wait_for(is_gone)
"""
TELL_SIGNALS = """
got = []
def tell(signum, frame):
    got.append(signum)
    print("got", signal.Signals(signum).name)
signal.signal(signal.SIGTERM, tell)
signal.signal(signal.SIGINT, tell)
print("ready")
"""
BEATS = """
def beat(step, phase, progressed=0.0):
    "Writes the heartbeat that a worker of ctl writes about once a second."
    path = pathlib.Path(os.environ["CTL_HEARTBEAT"])
    facts = {"pid": os.getpid(), "step": step, "phase": phase}
    facts |= {"beat": time.time(), "progressed": progressed}
    path.write_text(json.dumps(facts))
    (here / f"beats_{job}").touch()
    time.sleep(0.05)
"""


class Job:
    def __init__(self, directory):
        self.dir = directory
        self.logs = directory / "logs"
        self.process = None

    def start(self, worker, *options, under=(), **popen):
        """Starts the launcher for the program `worker`.

        `under` is a command prefix, `command` are arguments of the program.
        """
        arguments = popen.pop("command", [])
        program = self.dir / "worker.py"
        program.write_text(WORKER + textwrap.dedent(worker))
        command = [*under, sys.executable, "-m", "ctl", "launch", f"--log_dir={self.logs}"]
        environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        environ |= {"PYTHONPATH": str(ROOT), "TEST_DIR": str(self.dir), **popen.pop("env", {})}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        self.process = subprocess.Popen(
            [*command, *options, "--", sys.executable, str(program), *arguments], env=environ, **streams
        )
        return self.process

    def run(self, worker, *options, **popen):
        """Starts the launcher and waits. Returns the exit code, stdout as bytes and stderr as text."""
        out, err = self.start(worker, *options, **popen).communicate(timeout=TIMEOUT_SECS)
        return self.process.returncode, out, err.decode()

    def end(self, timeout_secs=TIMEOUT_SECS):
        """Waits for the end of the launcher. Returns its exit code and its errors."""
        err = self.process.communicate(timeout=timeout_secs)[1]
        return self.process.returncode, (err or b"").decode()

    def log(self, number):
        """Returns the log of a number, or of a name such as "ps_0"."""
        path = self.logs / f"{number if isinstance(number, str) else f'job_{number}'}.log"
        return path.read_text() if path.exists() else ""

    @property
    def attempts(self):
        """The recorded attempts that have ended."""
        path = self.logs / "attempts.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for_logs(self, text, workers=2):
        """Waits until the log of each worker has a complete line that contains a text."""
        line = re.compile(re.escape(text) + ".*\n")
        wait_until(lambda: all(line.search(self.log(i)) for i in range(workers)))


def read_until(stream, text):
    """Reads a file descriptor until `text` is received. Returns all received bytes."""
    received, until = b"", time.monotonic() + TIMEOUT_SECS
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    while text not in received:
        assert time.monotonic() < until, f"{text!r} did not come, only {received!r}"
        if poller.poll(100):
            received += os.read(stream, 65536)
    return received


def is_alive(pid):
    """Returns whether a process runs. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pid_of(job, name):
    """Returns the number after "pid" in a worker's log, once its line is complete."""
    return pids_of(job, name)[0]


def pids_of(job, name):
    """Returns the numbers after "pid" in a worker's log, once their line is complete."""
    line = wait_until(lambda: re.search(r"^pid (.*)\n", job.log(name), re.MULTILINE))
    return [int(number) for number in line[1].split()]
