"""A job with parameter servers: one process per task, on ports that the parent selects."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import processes
from conftest import ROOT, TIMEOUT_SECS, Result, environment, free_ports
from polling import wait_until


class ServedJob:
    """Tasks as processes. `start` sets TF_CONFIG for each task, `stop_all` kills the running tasks."""

    def __init__(self, directory: Path, arguments: list[str], *, workers: int = 2, servers: int = 1):
        self.directory = directory
        self._arguments = [str(ROOT / a) if a.endswith(".py") else a for a in arguments]
        addresses = [f"127.0.0.1:{p}" for p in free_ports(1 + workers + servers)]
        self.cluster = {
            "chief": addresses[:1],
            "worker": addresses[1 : 1 + workers],
            "ps": addresses[1 + workers :],
        }
        self.tasks: dict[str, subprocess.Popen] = {}
        self._all: list[subprocess.Popen] = []

    def start(self, *names: str, directories: Mapping[str, Path] = {}) -> None:
        """Starts tasks such as "worker0", or all tasks with the chief last."""
        all_names = [f"{k}{i}" for k in ("ps", "worker", "chief") for i in range(len(self.cluster[k]))]
        for name in names or all_names:
            role, index = name.rstrip("0123456789"), int(name[len(name.rstrip("0123456789")) :])
            config = {"cluster": self.cluster, "task": {"type": role, "index": index}}
            with self.log(name).open("ab") as log:
                process = processes.start(
                    [sys.executable, *self._arguments], stdout=log, stderr=subprocess.STDOUT,
                    env=environment(TF_CONFIG=json.dumps(config)), cwd=directories.get(name, ROOT),
                )  # fmt: skip
            self.tasks[name] = process
            self._all.append(process)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def result(self, name: str, timeout: float = TIMEOUT_SECS) -> Result:
        """Waits for a task to end."""
        code = self.tasks[name].wait(timeout=timeout)
        return Result(code, self.log(name).read_text(errors="replace"))

    def cpu_secs(self, name: str) -> float:
        """Returns the CPU time of a task (seconds). A parameter server uses little."""
        stat = Path(f"/proc/{self.tasks[name].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def wait_until(self, condition) -> None:
        """Waits until `condition()` holds, as long as the chief runs."""
        log = self.log("chief0")
        wait_until(condition, self.tasks["chief0"], show=lambda: log.read_text(errors="replace")[-3000:])

    def stop_all(self) -> None:
        for process in self._all:
            if process.poll() is None:
                process.kill()
                process.wait(TIMEOUT_SECS)
