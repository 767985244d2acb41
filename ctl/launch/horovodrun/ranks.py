"""The processes of a job: started one by one, ended together.

ranks = Ranks(["python", "train.py"], output)
ranks.start(task, {"HOROVOD_RANK": "0"}, private={"CTL_HVD_SECRET": "..."})
ranks.poll()                -> the Exits since the last call
ranks.end(grace_secs=10.0)

Each has a number, the index of its task. All of it belongs into the main thread: the kernel ends a
process with the thread that started it.
"""

import signal
from collections.abc import Callable, Mapping, Sequence

from ctl.distribute.cluster import Cluster
from ctl.errors import UsageError
from ctl.launch import processes
from ctl.launch.guard import Guard
from ctl.launch.horovodrun.output import Output
from ctl.launch.processes import Exit, Process
from ctl.launch.ssh import Door


class Ranks:
    """The processes, and the guard that ends them when we are killed.

    Attributes:
      exits: those that have ended, in the order in which it was noticed.
    """

    def __init__(self, command: Sequence[str], output: Output, *, door: Door | None = None):
        self.exits: list[Exit] = []
        self._command = list(command)
        self._output = output
        self._door = door
        self._processes: list[Process] = []
        self._guard = Guard()

    def start(
        self, task: Cluster, environ: Mapping[str, str], *, private: Mapping[str, str],
        host: str | None = None,
    ) -> None:  # fmt: skip
        """Starts one more; UsageError when it cannot be run."""
        number = task.task_index
        out, err = self._output.writers(number)
        try:
            process = processes.start(
                self._command, task, output=out, errors=err, environ=environ, private=private,
                host=host, door=self._door,
            )  # fmt: skip
        except OSError as e:
            raise UsageError(
                f"{self._command[0]!r} cannot be started ({e.strerror or e})"
            ) from None
        finally:
            self._output.given(number)
        self._processes.append(process)
        self._guard.add(process.pid)

    def poll(self) -> list[Exit]:
        """Notes and returns those that have ended since the last call; does not wait."""
        news = []
        for process in self._processes:
            end = process.poll()
            if end:
                self._guard.remove(process.pid)
                news.append(end)
        self._processes = [p for p in self._processes if not p.has_ended]
        self.exits += news
        return news

    @property
    def running(self) -> list[int]:
        """The numbers of those not yet seen to have ended."""
        return [process.task.task_index for process in self._processes]

    @property
    def tasks(self) -> list[Cluster]:
        """The same as tasks."""
        return [process.task for process in self._processes]

    @property
    def stopped(self) -> list[Cluster]:
        """Those of this machine that the kernel calls stopped, as after SIGSTOP."""
        return [process.task for process in self._processes if process.is_stopped]

    def send(self, number: int, signum: int) -> None:
        """A signal to one of them; SIGKILL goes to all that it has started, too."""
        for process in self._processes:
            if process.task.task_index == number:
                if signum == signal.SIGKILL:
                    process.kill()
                else:
                    process.send(signum)

    def end(
        self, grace_secs: float, signum: int = signal.SIGTERM,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Ends all: `signum`, and SIGKILL after the grace or once `hurry()`; copies their last words."""
        processes.end(list(self._processes), self.poll, grace_secs, signum, hurry)
        self._output.finish()
        self._guard.close()
