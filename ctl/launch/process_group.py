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
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ctl.distribute.cluster import Cluster
from ctl.errors import UsageError
from ctl.launch import groups, processes
from ctl.launch.guard import Guard
from ctl.launch.log_files import Bounds
from ctl.launch.logs import ConsoleCopy
from ctl.launch.processes import Exit, Process, start
from ctl.launch.roles import log_name

_NOBODY: Mapping[str, str] = {}


class Gang:
    """The processes of one job, started together and ended together.

    Attributes:
      exits: those that have ended, in the order in which it was noticed.

    Each process leads a session of its own, so a Ctrl-C in the terminal reaches it only through
    us; what it has started itself is killed when it has ended, or when we are killed.
    """

    def __init__(
        self, command: Sequence[str], tasks: Sequence[Cluster], log_dir: Path, *,
        far: Mapping[str, str] = _NOBODY,
        environ: Callable[[Cluster], Mapping[str, str]] = lambda _: {},
        private: Mapping[str, str] = _NOBODY,
        most_log_bytes: int = 0,
    ):  # fmt: skip
        """Keeps.

        Args:
          far: address in the cluster -> host, for those on other machines.
          environ: what a process is told beside TF_CONFIG.
          private: what all are told, and never on a command line.
          most_log_bytes: of one log file; 0 is without bound.
        """
        self.tasks = tuple(tasks)
        self.exits: list[Exit] = []
        self._command = list(command)
        self._log_dir = log_dir
        self._far = far
        self._environ = environ
        self._private = private
        self._bounds = Bounds(most_log_bytes)
        self._processes: list[Process] = []
        self._console: ConsoleCopy | None = None
        self._guard: Guard | None = None

    def start(self) -> None:
        """Starts every process with its TF_CONFIG; a log of an earlier start is overwritten.

        Raises UsageError when a log cannot be written or the command cannot be run.
        """
        self._guard = Guard()
        try:
            self._console = ConsoleCopy(self.log(self.tasks[0]))
            try:
                self._spawn(self.tasks[0], self._console.writer)
                for task in self.tasks[1:]:
                    self.log(task).unlink(missing_ok=True)
                    with open(self.log(task), "ab") as file:  # appending, so that it can be cut
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
        ends = [(process, process.poll()) for process in self._processes]
        for process, end in ends:
            if end and self._guard:
                self._guard.remove(process.pid)
        self._processes = [process for process, end in ends if end is None]
        self._bounds.look(map(self.log, self.running))
        news = [end for _, end in ends if end]
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
        processes.end(chosen, self.poll, grace_secs, signum, hurry)
        if only is None:
            if self._console:
                self._console.finish()
            if self._guard:
                self._guard.close()

    def kill(self, task: Cluster) -> None:
        """SIGKILL to one process and all in its group; returns when it has ended."""
        chosen = [process for process in self._processes if process.task == task]
        for process in chosen:
            process.kill()
        processes.wait(chosen, self.poll)

    @property
    def running(self) -> tuple[Cluster, ...]:
        """Those not yet seen to have ended."""
        return tuple(process.task for process in self._processes)

    @property
    def stopped(self) -> tuple[Cluster, ...]:
        """Those of this machine that the kernel calls stopped, as after SIGSTOP."""
        return tuple(process.task for process in self._processes if process.is_stopped)

    def cpu_ticks(self) -> Mapping[str, int]:
        """Name of the log -> processor time of a process of this machine, with what it has started."""
        found, far = groups.cpu_ticks(), self.far
        return {log_name(p.task): found.get(p.pid, 0) for p in self._processes if p.task not in far}

    @property
    def far(self) -> tuple[Cluster, ...]:
        """Those that run on other machines."""
        return tuple(task for task in self.running if task.address in self._far)

    @property
    def failures(self) -> list[Exit]:
        """The exits that were not 0, first noticed first."""
        return [e for e in self.exits if e.returncode != 0]

    def log(self, task: Cluster) -> Path:
        """The log file of one process."""
        return self._log_dir / log_name(task)

    def _spawn(self, task: Cluster, output: int) -> None:
        process = start(
            self._command, task, output=output, environ=self._environ(task),
            private=self._private, host=self._far.get(task.address or ""),
        )  # fmt: skip
        self._processes.append(process)
        if self._guard:
            self._guard.add(process.pid)
