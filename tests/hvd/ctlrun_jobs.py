"""Runs of `ctlrun` in tests. Small Python programs replace training scripts."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import processes
from conftest import ROOT
from polling import wait_until

TIMEOUT_SECS = 600
PROGRAM_START = """
import json, os, pathlib, signal, sys, time
rank = int(os.environ["HOROVOD_RANK"])
here = pathlib.Path(os.environ["TEST_DIR"])

def wait_for(condition):
    until = time.monotonic() + 600
    while not condition():
        if time.monotonic() > until:
            sys.exit("waited in vain")
        time.sleep(0.01)

def leave(name, text=""):
    (here / f"{name}.new").write_text(text)
    (here / f"{name}.new").rename(here / name)
"""


class Ctlrun:
    """One start of the command in a separate directory. `warm` is set if its programs use TensorFlow."""

    def __init__(self, directory: Path, *, warm: bool = False):
        self.dir = directory
        self._start = processes.start if warm else subprocess.Popen
        self.process: subprocess.Popen | None = None

    def start(self, program: str, *options: str, arguments: tuple[str, ...] = (), **environ: str):
        """Starts the launcher for the text of a program; returns its process."""
        path = self.dir / "train.py"
        path.write_text(PROGRAM_START + textwrap.dedent(program))
        return self.begin(*options, sys.executable, str(path), *arguments, **environ)

    def begin(self, *arguments: str, **environ: str):
        """Starts the launcher with these arguments."""
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("HOROVOD_", "CTL_", "TF_CONFIG", "CUDA_VISIBLE"))
        }
        clean |= {"PYTHONPATH": str(ROOT), "TEST_DIR": str(self.dir), **environ}
        self.process = self._start(
            [sys.executable, "-m", "ctl.launch.horovodrun_cli", *arguments], env=clean, cwd=self.dir,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return self.process

    def run(self, program: str, *options: str, **start_options) -> tuple[int, str, str]:
        """Starts the launcher and waits. Returns exit code, stdout and stderr."""
        self.start(program, *options, **start_options)
        return self.end()

    def run_command(self, *arguments: str, **environ: str) -> tuple[int, str, str]:
        """Runs the command with these arguments instead of a test program."""
        self.begin(*arguments, **environ)
        return self.end()

    def end(self) -> tuple[int, str, str]:
        assert self.process
        out, err = self.process.communicate(timeout=TIMEOUT_SECS)
        return self.process.returncode, out.decode(), err.decode()

    def read(self, name: str) -> str:
        """Returns the content that a program wrote under a name, after it exists."""
        wait_until((self.dir / name).exists)
        return (self.dir / name).read_text()

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_SECS)


def by_rank(text: str, stream: str = "stdout") -> dict[int, list[str]]:
    """Returns the lines of each rank, without their prefixes."""
    lines_by_rank: dict[int, list[str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(rf"\[(\d+)\]<{stream}>:(.*)", line)
        if match:
            lines_by_rank.setdefault(int(match[1]), []).append(match[2])
    return lines_by_rank
