"""An elastic job of `ctl launch` on hosts with a real sshd. Its workers print their steps.

    job = Job(ssh_hosts, tmp_path, "--workers=1:3", "-H", "hosta,hostb,hostc", flags=["--heartbeat_secs=6"])
    job.wait_for_step(10); ssh_hosts.disconnect("hosta"); job.wait()
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import processes
import training
from conftest import PROGRAMS, ROOT
from polling import wait_until
from test_ssh_commands import environ

TIMEOUT_SECS = 600
FLAGS = ("--dropout=0", "--export=none")
FACTS = re.compile(r"\[(\d+)\]<stdout>:(\{.*\})")


class Job:
    """A started job. Its output is in a file.

    Args:
      hosts: Hosts of the test.
      directory: Directory of the test.
      options: Options of `ctl launch`.
      flags: Flags of the program.
      variables: Environment variables of the program.
    """

    def __init__(self, hosts, directory: Path, *options: str, flags=(), **variables: str):
        self.model_dir = directory / "m"
        self._output = directory / "output"
        variables = {"FAULTS_DIR": str(directory), "PAUSE_SECS": "0.3", **variables}
        program = [
            "env", *(f"{name}={value}" for name, value in variables.items()),
            sys.executable, str(PROGRAMS / "leaving.py"), f"--model_dir={self.model_dir}",
            f"--train_steps={training.STEPS}", *training.OPTIONS, *FLAGS, *flags,
        ]  # fmt: skip
        with self._output.open("wb") as output:
            self.process = hosts.popen(
                ["ctl", "launch", *options, f"--log_dir={directory}/logs", "--", *program],
                env=environ(PYTHONPATH=f"{ROOT}"), cwd=ROOT, stdout=output, stderr=output,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """The output of the launcher."""
        return self._output.read_text()

    @property
    def facts(self) -> list[dict]:
        """The JSON lines of the workers in the order of time, with the number of the process."""
        lines = FACTS.findall(self.output)
        facts = [{"process": int(number), **json.loads(text)} for number, text in lines]
        return sorted(facts, key=lambda fact: fact["time"])

    def wait_for(self, condition, timeout_secs=TIMEOUT_SECS):
        """Waits for a condition and returns its value. Fails if the job ends before."""
        return wait_until(
            condition, self.process, show=lambda: self.output[-6000:], timeout_secs=timeout_secs,
            pause_secs=0.05,
        )  # fmt: skip

    def wait_for_step(self, step: int, size: int = 0) -> None:
        """Waits until a worker has completed a step, in a group of `size` workers if it is not 0."""
        self.wait_for(
            lambda: any(f.get("step", 0) >= step and size in (0, f["size"]) for f in self.facts)
        )

    def pids(self) -> dict[int, int]:
        """Returns the number of each living process of the job -> its process ID."""
        numbers = {}
        for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
            if f"--model_dir={self.model_dir}" in processes.words_of(pid):
                number = processes.variables_of(pid).get("CTL_HVD_WORKER")
                numbers |= {int(number): pid} if number else {}
        return numbers

    def slots(self) -> dict[int, int]:
        """Returns the number of each living process -> the number of its replica."""
        variables = {number: processes.variables_of(pid) for number, pid in self.pids().items()}
        return {number: int(v["CTL_ELASTIC_SLOT"]) for number, v in variables.items() if v}

    def pause_secs(self) -> float:
        """Returns the time from the last step of the first group to the first one of the next (seconds)."""
        steps = [fact for fact in self.facts if "step" in fact]
        next_steps = [fact for fact in steps if fact["size"] != steps[0]["size"]]
        last = max(f["time"] for f in steps if f["time"] < next_steps[0]["time"])
        return next_steps[0]["time"] - last

    def wait(self) -> int:
        """Waits for the end of the job and returns its exit code."""
        return self.process.wait(TIMEOUT_SECS)

    def stop(self) -> None:
        """Ends the job and its processes, also those that its launcher cannot reach."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(TIMEOUT_SECS)
        for pid in self.pids().values():
            os.kill(pid, signal.SIGKILL)
