"""Elastic jobs of real processes on this machine. All host names refer to it.

job = ElasticJob(tmp_path, "127.0.0.1:2", "-np", "2", "--min-np", "1")
job.wait_for_step(3)
job.hosts("127.0.0.1:2", "127.0.0.2:1")
code, output = job.end()
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import processes
from conftest import ROOT
from polling import wait_until

PROGRAMS = Path(__file__).resolve().parent / "programs"
TIMEOUT_SECS = 600
LINE = re.compile(r"\[(\d+)\]<stdout>:(\{.*\})[\r\n]")


class ElasticJob:
    """One `ctlrun` with a discovery script; its output is in a file."""

    def __init__(self, directory: Path, hosts: str, *options: str, last_step=1000, program=None):
        self.dir = directory
        self.hosts(*hosts.split())
        script = directory / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat '{directory}/hosts'\n")
        script.chmod(0o755)
        self.go(3)
        self.log = directory / "log"
        program = program or PROGRAMS / "elastic_training.py"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "CTL_", "TF_CONFIG"))}
        with self.log.open("wb") as log:
            self.process = processes.start(
                [
                    sys.executable, "-m", "ctl.launch.horovodrun_cli", *options, "--host-discovery-script",
                    str(script), sys.executable, str(program), str(directory), str(last_step),
                ],
                env={**clean, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            )  # fmt: skip

    def hosts(self, *lines: str) -> None:
        """Sets the list of hosts that the discovery script prints."""
        self._write("hosts", "".join(f"{line}\n" for line in lines))

    def go(self, step: int) -> None:
        """Permits training until this step."""
        self._write("go", str(step))

    def die(self, step: int) -> None:
        """Makes the last rank exit in this step."""
        self._write("die", str(step))

    def port(self, port: int) -> None:
        """Sets the port that process 0 uses next."""
        self._write("port", str(port))

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def facts(self) -> list[dict]:
        """The JSON lines of all processes, each with its process number."""
        return [{"number": int(m[1]), **json.loads(m[2])} for m in LINE.finditer(self.output)]

    def steps(self, step: int, size: int | None = None) -> list[dict]:
        """Returns the records of one step by rank, in a group of that size."""
        records = [f for f in self.facts if f.get("step") == step and size in (None, f["size"])]
        return sorted(records, key=lambda f: f["rank"])

    def wait_for_step(self, step: int, size: int) -> list[dict]:
        """Waits until all ranks of a group of this size have completed the step. Returns their records."""
        self.wait(lambda: len(self.steps(step, size)) == size)
        return self.steps(step, size)

    def wait(self, condition) -> None:
        """Waits until `condition()` holds. Fails if the job ends before, or after a timeout."""
        wait_until(condition, self.process, show=lambda: self.output[-6000:], pause_secs=0.05)

    def end(self) -> tuple[int, str]:
        """Waits for the end of the job. Returns its exit code and output."""
        return self.process.wait(TIMEOUT_SECS), self.output

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_SECS)

    def _write(self, name: str, text: str) -> None:
        new = self.dir / f"{name}.new"
        new.write_text(text)
        new.rename(self.dir / name)
