"""One process of a job and its end. `ctl.launch.remote_process` implements processes of other machines.

process = start_process(command, task, output=file.fileno(), environ={"CTL_ATTEMPT": "1"})
process.send(signal.SIGTERM)
process.poll()                -> a ProcessExit once it has ended
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ctl.distribute.platforms import detection
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.memory import Memory
from ctl.launch.process_tree import die_with_parent, kill_group, process_state
from ctl.launch.restart_policy import ERROR, KILLED, OUT_OF_MEMORY
from ctl.launch.roles import task_name

_MEMORY_INTERVAL_SECS = 0.5
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
JOB_VARIABLES = frozenset({  # variables of an outer job do not apply to this one
    *detection.VARIABLES, "CTL_RESTART_REASON", "CTL_ATTEMPT", "CTL_HEARTBEAT", "CTL_HVD_SECRET",
    "CTL_HVD_RENDEZVOUS", "CTL_HVD_WORKER", "CTL_ELASTIC", "CTL_ELASTIC_NEWCOMER", "CTL_ELASTIC_SLOT",
    "CTL_HVD_HOST", "HOROVOD_ELASTIC", "HOROVOD_RANK",
    "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME",
})  # fmt: skip


@dataclass(frozen=True)
class ProcessExit:
    """End of one process.

    Attributes:
      task: Task of the process.
      returncode: Exit code, negative for a signal, as in `subprocess`.
      lived_secs: Lifetime (seconds).
      description: End of a sentence that begins with the process's name, or "". Set for a hung process.
      silent_secs: Duration of a hang.
      loss: A constant of `restart_policy`.
      hint: Additional information.
    """

    task: Topology
    returncode: int
    lived_secs: float
    description: str = ""
    silent_secs: float | None = None
    loss: str = ERROR
    hint: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of a shell: 128+n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended the process, such as "SIGKILL", or None."""
        if self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"

    @property
    def reason(self) -> str:
        """A sentence without a full stop that names the failed process and the error."""
        return f"{task_name(self.task)} " + (self.description or f"failed: {self}")

    def __str__(self) -> str:
        return (
            f"it {self.description}"
            if self.description
            else self.signal_name or f"exit code {self.returncode}"
        )


class Process:
    """A process of a job, implemented by `LocalProcess` and `RemoteProcess`.

    Attributes:
      task: Task of the process.
      pid: Process ID on this machine, which is that of ssh for a remote process.
      host: Target of ssh; None for this machine.
    """

    def __init__(self, task: Topology, pid: int, host: str | None = None):
        self.task = task
        self.pid = pid
        self.host = host
        self._started_secs = time.monotonic()
        self._is_killed = False  # by the launcher

    @property
    def has_ended(self) -> bool:
        """True if the process had ended at the last `poll`."""
        raise NotImplementedError

    @property
    def is_stopped(self) -> bool:
        """True for a process that is stopped by SIGSTOP, Ctrl-Z or a debugger."""
        raise NotImplementedError

    def send(self, signum: int) -> None:
        """Sends a signal to the process itself, not to its children."""
        raise NotImplementedError

    def kill(self) -> None:
        """Sends SIGKILL to the process and its group."""
        raise NotImplementedError

    def poll(self) -> ProcessExit | None:
        """Returns the end of the process once no process of its group is left, or None while it runs."""
        raise NotImplementedError

    def build_exit(self, returncode: int) -> ProcessExit:
        """Returns the exit for a return code. A SIGKILL that the launcher did not send is KILLED."""
        process_exit = ProcessExit(self.task, returncode, time.monotonic() - self._started_secs)
        kill_codes = (
            -signal.SIGKILL,
            128 + signal.SIGKILL,
        )  # the second is reported by an intermediate shell
        return (
            process_exit
            if returncode not in kill_codes or self._is_killed
            else replace(process_exit, loss=KILLED)
        )


class LocalProcess(Process):
    """A process of this machine, which leads a session."""

    def __init__(self, task: Topology, popen: subprocess.Popen[bytes]):
        super().__init__(task, popen.pid)
        self._popen = popen
        self._memory = Memory(popen.pid)
        self._memory_read_secs = 0.0

    @property
    def has_ended(self) -> bool:
        """True if the process had ended at the last `poll`."""
        return self._popen.returncode is not None

    @property
    def is_stopped(self) -> bool:
        """True for a process that is stopped by SIGSTOP, Ctrl-Z or a debugger, as of now."""
        return process_state(self.pid) in ("T", "t")

    def send(self, signum: int) -> None:
        """Sends a signal to the process, not to its children."""
        self._popen.send_signal(signum)

    def kill(self) -> None:
        """Sends SIGKILL to the session of the process."""
        self._is_killed = True
        kill_group(self.pid)

    def poll(self) -> ProcessExit | None:
        """Returns the exit once the process has ended, and kills its children. Also samples its memory."""
        returncode = self._popen.poll()
        if returncode is not None:
            kill_group(self.pid)
            return self.build_exit(returncode)
        now_secs = time.monotonic()
        if now_secs - self._memory_read_secs >= _MEMORY_INTERVAL_SECS:
            self._memory_read_secs = now_secs
            self._memory.read()
        return None

    def build_exit(self, returncode: int) -> ProcessExit:
        """Returns the exit, with the memory that a killed process had used."""
        process_exit = super().build_exit(returncode)
        if process_exit.loss != KILLED:
            return process_exit
        if oom_description := self._memory.describe_out_of_memory():
            return replace(process_exit, description=oom_description, loss=OUT_OF_MEMORY)
        peak = self._memory.peak
        hint = f"the SIGKILL is not from the launcher; peak memory of the process: {peak}"
        return replace(process_exit, hint=hint)


def check_program(program: str, fix: str) -> None:
    """Raises UsageError for a program that does not exist or cannot be executed."""
    if shutil.which(program) is None:
        problem = "cannot be run" if os.path.exists(program) else "was not found"
        raise UsageError(f"the command {quoted(program)} {problem}; {fix}")


def start_process(
    command: Sequence[str], task: Topology, *, output: int, errors: int, environ: Mapping[str, str]
) -> Process:
    """Starts the command on this machine as one task of a cluster.

    Args:
      command: Program and arguments.
      task: Task of the process.
      output: File descriptor for its stdout.
      errors: File descriptor for its stderr.
      environ: Variables besides TF_CONFIG, which a task of an empty cluster does not receive.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in JOB_VARIABLES}
    popen = subprocess.Popen(
        command,
        env={**inherited, **task_environ(task, environ), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509 (it only calls into C)
    )
    return LocalProcess(task, popen)


def task_environ(task: Topology, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `environ` with the TF_CONFIG of a task, if its cluster is not empty."""
    return {**environ, **({"TF_CONFIG": task.tf_config()} if task.tasks else {})}
