"""The processes of one job, started individually and ended together.

    group = ProcessGroup(["python", "train.py"], LogOutput(log_dir, tasks))
    for task in tasks:
        group.start(task, {"CTL_ATTEMPT": "1"})
    while group.running:
        for end in group.poll():
            print(task_name(end.task), end)
    group.end(grace_secs=0.0)

Use it in the main thread only: the kernel ends a process together with the thread that started it.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.launch.output import Output
from ctl.launch.process import NO_VARIABLES, Process, ProcessExit, start_process, task_environ
from ctl.launch.process_tree import Guard, OrphanReaper, tree_cpu_ticks
from ctl.launch.remote_process import HostConnection
from ctl.launch.roles import log_name
from ctl.launch.ssh import SshOptions

_WAIT_INTERVAL_SECS = 0.05
_KILL_SECS = 10.0  # a killed process that has not ended by then is left to the kernel


class ProcessGroup:
    """The processes of one job, and the guard that ends them if the launcher is killed.

    Each process leads its own session, so a Ctrl-C in the terminal reaches it only through the launcher.
    Its child processes are killed after its end, or if the launcher is killed.

    Attributes:
      exits: Ends of processes in the order of detection.
    """

    def __init__(self, command: Sequence[str], output: Output, *, ssh_options: SshOptions | None = None):
        self.exits: list[ProcessExit] = []
        self._command = list(command)
        self._output = output
        self._ssh_options = ssh_options
        self._processes: list[Process] = []
        self._connections: dict[str, HostConnection] = {}  # by host
        self._closing: list[HostConnection] = []
        self._starts: dict[str, Callable[[], None]] = {}  # by the name of the log
        self._guard = Guard()
        self._orphans = OrphanReaper()

    def start(
        self,
        task: Topology,
        environ: Mapping[str, str],
        *,
        private: Mapping[str, str] = NO_VARIABLES,
        host: str | None = None,
    ) -> None:
        """Starts one process. Raises UsageError if it cannot run or its output cannot be written.

        Args:
          task: Task of the process.
          environ: Environment variables.
          private: Further variables, which have priority.
          host: Target of ssh, None for this machine.
        """
        variables = {**environ, **private}
        try:
            output, errors = self._output.open_writers(task)
            if host is None:
                process = start_process(
                    self._command, task, output=output, errors=errors, environ=variables
                )
            else:
                variables = task_environ(task, variables)
                connection = self._connect(host)
                process = connection.start(self._command, task, variables, output=output, errors=errors)
        except OSError as error:
            raise UsageError(
                f"{self._command[0]!r} cannot be started ({error}); expected an executable "
                "command and a writable log directory"
            ) from error
        finally:
            self._output.close_writers(task)
        self._processes.append(process)
        self._guard.add(process.pid)
        self._starts[log_name(task)] = lambda: self.start(task, environ, private=private, host=host)

    def restart(self, process_exit: ProcessExit) -> None:
        """Starts a process that has ended again, with the same task and environment.

        Unlike at the first start, other threads exist. They hold no lock that the few instructions of
        the child need: Python forks with its own locks, and malloc's lock is safe to fork with.
        """
        self._output.append_line(process_exit.task, f"ended with {process_exit}; restarting")
        with contextlib.suppress(UsageError):
            self._starts[log_name(process_exit.task)]()

    def poll(self) -> list[ProcessExit]:
        """Records and returns the processes that have ended since the last call. Does not block."""
        self._poll_connections()
        exits = [process_exit for process in self._processes if (process_exit := process.poll())]
        for process in self._processes:
            if process.has_ended and process.host is None:
                self._guard.remove(process.pid)
        self._processes = [process for process in self._processes if not process.has_ended]
        for process_exit in exits:
            self._output.drain(process_exit.task)
        self._output.limit_logs(self.running)
        self.exits += exits
        child_pids = {process.pid for process in self._processes}
        child_pids |= {connection.pid for connection in [*self._connections.values(), *self._closing]}
        self._orphans.poll(child_pids | self._guard.pids)
        return exits

    def send(self, task: Topology, signum: int) -> None:
        """Sends a signal to one process. SIGKILL is sent to its whole group."""
        for process in self._processes:
            if process.task == task:
                process.kill() if signum == signal.SIGKILL else process.send(signum)

    def kill(self, task: Topology) -> None:
        """Sends SIGKILL to one process and its group. Returns when it has ended."""
        self.send(task, signal.SIGKILL)
        self._wait([process for process in self._processes if process.task == task], _KILL_SECS)

    def end(
        self,
        grace_secs: float,
        signum: int = signal.SIGTERM,
        is_urgent: Callable[[], bool] = lambda: False,
        only: Sequence[Topology] | None = None,
    ) -> None:
        """Sends `signum`, and SIGKILL after `grace_secs` or if `is_urgent()`. Returns when all have ended.

        With `only`, other processes are not affected. For all processes, this also completes the output;
        without running processes it does only that.
        """
        selected = [p for p in self._processes if only is None or p.task in only]
        for process in selected:
            process.send(signum)
        self._wait(selected, grace_secs, is_urgent)
        for process in selected:
            if not process.has_ended:
                process.kill()
        self._wait(selected, _KILL_SECS)
        if only is None:
            self._close_connections()
            self._output.finish()
            self._guard.close()

    @property
    def running(self) -> tuple[Topology, ...]:
        """The processes that have not been reported as ended."""
        return tuple(process.task for process in self._processes)

    @property
    def stopped(self) -> tuple[Topology, ...]:
        """The processes of this machine in the kernel's state "stopped", as after SIGSTOP."""
        return tuple(process.task for process in self._processes if process.is_stopped)

    @property
    def remote(self) -> tuple[Topology, ...]:
        """The processes on other machines."""
        return tuple(process.task for process in self._processes if process.host)

    @property
    def failures(self) -> list[ProcessExit]:
        """The exits other than 0, in the order of detection."""
        return [process_exit for process_exit in self.exits if process_exit.returncode != 0]

    def cpu_ticks(self) -> Mapping[str, int]:
        """Returns the processor time of each process tree of this machine by the name of the log."""
        pids = {log_name(p.task): p.pid for p in self._processes if not p.host}
        ticks = tree_cpu_ticks(pids.values())
        return {name: ticks[pid] for name, pid in pids.items() if pid in ticks}

    def _connect(self, host: str) -> HostConnection:
        """Returns the open connection to a host, or a new one."""
        if host not in self._connections:
            self._connections[host] = HostConnection(host, self._ssh_options)
            self._guard.add(self._connections[host].pid)
        return self._connections[host]

    def _poll_connections(self) -> None:
        """Polls all connections, and closes those without processes."""
        for host, connection in list(self._connections.items()):
            pid = connection.pid
            connection.poll()
            if connection.pid != pid:  # connected again
                self._guard.remove(pid)
                self._guard.add(connection.pid)
            if connection.is_idle or connection.has_ended:
                connection.close()
                self._closing.append(self._connections.pop(host))
        for connection in list(self._closing):
            connection.poll()
            if connection.has_ended:
                self._guard.remove(connection.pid)
                self._closing.remove(connection)

    def _close_connections(self) -> None:
        """Closes all connections. Returns when ssh has ended, which `kill` enforces."""
        deadline_secs = time.monotonic() + _KILL_SECS
        self._poll_connections()
        while self._closing and time.monotonic() < deadline_secs:
            time.sleep(_WAIT_INTERVAL_SECS)
            self._poll_connections()
        for connection in self._closing:
            connection.kill()

    def _wait(
        self,
        selected: Sequence[Process],
        timeout_secs: float,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits until all have ended, or until the timeout."""
        deadline_secs = time.monotonic() + timeout_secs
        self.poll()
        while not all(process.has_ended for process in selected):
            if time.monotonic() >= deadline_secs or is_urgent():
                return
            time.sleep(_WAIT_INTERVAL_SECS)
            self.poll()
