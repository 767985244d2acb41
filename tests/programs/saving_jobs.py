"""Sequential runs of `saving_faults.py`, and checks of the files that they leave."""

import contextlib
import json
import queue
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import processes
import pytest
from conftest import PROGRAMS, ROOT, TIMEOUT_SECS, Result, environment
from ctl.checkpoints import commit

PROGRAM = str(PROGRAMS / "saving_faults.py")
_DONE = '{"done": '


class Jobs:
    """A process that forks one process for each run."""

    def __init__(self):
        self._process = processes.start(
            [sys.executable, PROGRAM, "--forever"], env=environment(), cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=1,
        )  # fmt: skip
        self._lines: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line)

    def start(self, model_dir, *arguments, faults=""):
        self._process.stdin.write(shlex.join([faults, str(model_dir), *arguments]) + "\n")
        self._process.stdin.flush()

    def is_busy(self):
        """Returns whether the current run is active."""
        with self._lines.mutex:
            return not any(line.startswith(_DONE) for line in self._lines.queue)

    def wait(self):
        output = []
        while True:
            line = self._lines.get(timeout=TIMEOUT_SECS)
            if line.startswith(_DONE):
                return Result(json.loads(line)["done"], "".join(output))
            output.append(line)

    def __call__(self, model_dir, *arguments, faults=""):
        self.start(model_dir, *arguments, faults=faults)
        return self.wait()

    def close(self):
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def jobs():
    started = Jobs()
    yield started
    started.close()


@pytest.fixture(scope="module")
def unbroken(jobs, tmp_path_factory):
    """Returns the final values of a run of 8 steps without faults."""
    return jobs(tmp_path_factory.mktemp("unbroken")).json["final"]


def checkpoints(model_dir):
    """Returns the steps of the listed checkpoints. All of them must be complete."""
    listed = commit.list_checkpoints(Path(model_dir) / "checkpoints")
    for path, manifest in listed:
        assert commit.find_damage(path, manifest) is None, path
    return [m.step for _, m in listed]


def names(directory):
    return sorted(p.name for p in Path(directory).iterdir() if p.name != commit.LISTING)


def truncate_data(path):
    """Removes the last bytes of a checkpoint's data."""
    data = next(path.glob("state.data*"))
    data.write_bytes(data.read_bytes()[:-3])
