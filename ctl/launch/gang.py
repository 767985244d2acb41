"""The processes of one job: started together, ended together.

    gang = Gang(["python", "train.py"], tasks, log_dir)
    gang.start()
    while gang.running:
        for end in gang.poll():
            print(name(end.task), end)
    gang.end(grace_secs=0.0)

All of it belongs into the main thread: the kernel ends a worker with the thread that started it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ctl.cluster import Cluster
from ctl.errors import EXIT_FAILED, UsageError
from ctl.launch.logs import ConsoleCopy
from ctl.launch.roles import log_name

_POLL_SECS = 0.05
_KILL_SECS = 10.0  # a killed process that is not gone by then is left to the kernel
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass(frozen=True)
class Exit:
    """How one process ended; `returncode` is negative for a signal, as `subprocess` has it."""

    task: Cluster
    returncode: int
    lived_secs: float

    @property
    def exit_code(self) -> int:
        """The code a shell would give: 128+n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"


class Gang:
    """The processes of one job, started together and ended together.

    Attributes:
      exits: those that have ended, in the order in which it was noticed.

    Each process leads a session of its own, so a Ctrl-C in the terminal reaches it only through
    us; what it has started itself is killed when it has ended.
    """

    def __init__(self, command: Sequence[str], tasks: Sequence[Cluster], log_dir: Path):
        self.tasks = tuple(tasks)
        self.exits: list[Exit] = []
        self._command = list(command)
        self._log_dir = log_dir
        self._processes: list[_Process] = []
        self._console: ConsoleCopy | None = None

    def start(self) -> None:
        """Starts every process with its TF_CONFIG; a log of an earlier start is overwritten.

        Raises UsageError when a log cannot be written or the command cannot be run.
        """
        try:
            self._console = ConsoleCopy(self.log(self.tasks[0]))
            try:
                self._spawn(self.tasks[0], self._console.writer)
                for task in self.tasks[1:]:
                    with open(self.log(task), "wb") as file:
                        self._spawn(task, file.fileno())
            finally:
                self._console.start()  # after the last fork: threads and forks do not mix
        except OSError as e:
            self.end(0.0)
            raise UsageError(
                f"the workers could not be started: {e}. Expected a command that runs by itself "
                f"and a log directory that can be written; came {self._command[0]!r} and "
                f"{str(self._log_dir)!r}."
            ) from e

    def restart(self, end: Exit) -> None:
        """Starts a process that has ended once more, in its place; its log goes on.

        Unlike at `start` there are threads by now. They hold no lock that the child's few
        instructions need: Python forks with its own, and malloc's is safe to fork with.
        """
        with contextlib.suppress(OSError), open(self.log(end.task), "ab") as file:
            file.write(f"ctl launch: it ended with {end} and is started again\n".encode())
            file.flush()
            self._spawn(end.task, file.fileno())

    def poll(self) -> list[Exit]:
        """Notes and returns the processes that have ended since the last call; does not wait."""
        news = []
        for process in self._processes:
            returncode = process.popen.poll()
            if returncode is not None:
                _kill_group(process.popen.pid)
                lived_secs = time.monotonic() - process.started_secs
                news.append(Exit(process.task, returncode, lived_secs))
        self._processes = [p for p in self._processes if p.popen.returncode is None]
        self.exits += news
        return news

    def end(
        self,
        grace_secs: float,
        signum: int = signal.SIGTERM,
        hurry: Callable[[], bool] = lambda: False,
        only: Sequence[Cluster] | None = None,
    ) -> None:
        """Sends `signum`, and SIGKILL after `grace_secs` or once `hurry()`; returns when all ended.

        `only` leaves the others alone. For all, this also completes the chief's log; without
        running processes that is all it does.
        """
        chosen = [p for p in self._processes if only is None or p.task in only]
        for process in chosen:
            process.popen.send_signal(signum)
        self._wait(chosen, grace_secs, hurry)
        for process in chosen:
            if process.popen.returncode is None:
                _kill_group(process.popen.pid)
        self._wait(chosen, _KILL_SECS)
        if self._console and only is None:
            self._console.finish()

    @property
    def running(self) -> tuple[Cluster, ...]:
        """Those not yet seen to have ended."""
        return tuple(process.task for process in self._processes)

    @property
    def failures(self) -> list[Exit]:
        """The exits that were not 0, first noticed first."""
        return [e for e in self.exits if e.returncode != 0]

    def log(self, task: Cluster) -> Path:
        """The log file of one process."""
        return self._log_dir / log_name(task)

    def _spawn(self, task: Cluster, output: int) -> None:
        popen = subprocess.Popen(
            self._command,
            env={**os.environ, "TF_CONFIG": task.tf_config(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_launcher(),  # noqa: PLW1509 (see `start`: no threads yet)
        )
        self._processes.append(_Process(task, popen, time.monotonic()))

    def _wait(
        self,
        chosen: "Sequence[_Process]",
        timeout_secs: float,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        until_secs = time.monotonic() + timeout_secs
        self.poll()
        while any(p.popen.returncode is None for p in chosen):
            if time.monotonic() >= until_secs or hurry():
                return
            time.sleep(_POLL_SECS)
            self.poll()


@dataclass(frozen=True)
class _Process:
    task: Cluster
    popen: subprocess.Popen
    started_secs: float  # time.monotonic


def _kill_group(pid: int) -> None:
    """SIGKILL to a process and all in its group; right after its end the number is still ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with_launcher() -> Callable[[], None] | None:
    """What a child does before it runs the command, so that a `kill -9` of us ends it too.

    Linux only: None elsewhere. It calls into C and nothing else, as is safe after a fork.
    """
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    launcher_pid = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher_pid:  # it was gone before the kernel knew of our wish
            os._exit(EXIT_FAILED)

    return in_child
