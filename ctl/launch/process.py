"""One process of a job, on this machine or behind ssh; and how it ended.

    process = start_process(command, task, output=file.fileno(), environ={"CTL_ATTEMPT": "1"})
    process.send(signal.SIGTERM)
    process.poll()                -> an ProcessExit once it has ended

A process of another machine takes signals as lines on the standard input of ssh.
"""

import contextlib
import fcntl
import json
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
from ctl.launch import ssh
from ctl.launch.memory import Memory
from ctl.launch.process_tree import die_with_parent, kill_group, process_state
from ctl.launch.remote import KEEPALIVE_SECS
from ctl.launch.restart_policy import ERROR, KILLED, OUT_OF_MEMORY, OUTSIDE
from ctl.launch.roles import task_name

_MEMORY_INTERVAL_SECS = 0.5
_PIPE_BYTES = 2**20  # for an environment; the kernel's own size is 64 KiB
_REMOTE_KILL_SECS = 2.0  # for the far end of the connection to kill its process
_ORDERS = {signal.SIGTERM: b"TERM\n", signal.SIGINT: b"INT\n", signal.SIGKILL: b"KILL\n"}
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
JOB_VARIABLES = frozenset({  # those of an outer job say nothing about this one
    *detection.VARIABLES, "CTL_RESTART_REASON", "CTL_ATTEMPT", "CTL_HEARTBEAT", "CTL_HVD_SECRET",
    "CTL_HVD_RENDEZVOUS", "CTL_HVD_WORKER", "CTL_HVD_HOST", "HOROVOD_ELASTIC", "HOROVOD_RANK",
    "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME",
})  # fmt: skip
_SIGNALS_OF_CODES = {
    128 + n: -n for n in (signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
}


@dataclass(frozen=True)
class ProcessExit:
    """How one process ended; `returncode` is negative for a signal, as in `subprocess`.

    `why` continues a sentence that begins with the process's name, e.g. for one that was hung, and
    `silent_secs` is how long; `loss` is a constant of `restart_policy`, `hint` what else is known.
    """

    task: Topology
    returncode: int
    lived_secs: float
    why: str = ""
    silent_secs: float | None = None
    loss: str = ERROR
    hint: str = ""

    @property
    def exit_code(self) -> int:
        """The code a shell would give: 128+n for signal n."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def signal_name(self) -> str | None:
        """Of the signal that ended it, e.g. "SIGKILL"; None if none did."""
        if self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"

    @property
    def reason(self) -> str:
        """A sentence without its full stop: who failed, and how."""
        return f"{task_name(self.task)} " + (self.why or f"failed: {self}")

    def __str__(self) -> str:
        return f"it {self.why}" if self.why else self.signal_name or f"exit code {self.returncode}"


class Process:
    """A process of this machine, the leader of a session of its own."""

    host: str | None = None

    def __init__(self, task: Topology, popen: subprocess.Popen[bytes]):
        self.task = task
        self.pid = popen.pid
        self._popen = popen
        self._started_secs = time.monotonic()
        self._memory: Memory | None = Memory(popen.pid)
        self._memory_read_secs = 0.0
        self._is_killed = False  # by us

    @property
    def has_ended(self) -> bool:
        """As of the last `poll`."""
        return self._popen.returncode is not None

    @property
    def is_stopped(self) -> bool:
        """True for one that does not run because of SIGSTOP, Ctrl-Z or a debugger."""
        return process_state(self.pid) in ("T", "t")

    def send(self, signum: int) -> None:
        """A signal to the process itself, not to what it has started."""
        self._popen.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL to it and all in its group."""
        self._is_killed = True
        kill_group(self.pid)

    def poll(self) -> ProcessExit | None:
        """How it ended, and then nothing of its group is left; None while it runs."""
        returncode = self._popen.poll()
        if returncode is not None:
            kill_group(self.pid)
            return self._exit(returncode)
        now = time.monotonic()
        if self._memory is not None and now - self._memory_read_secs >= _MEMORY_INTERVAL_SECS:
            self._memory_read_secs = now
            self._memory.read()
        return None

    def _exit(self, returncode: int) -> ProcessExit:
        end = ProcessExit(self.task, returncode, time.monotonic() - self._started_secs)
        killed = -signal.SIGKILL, 128 + signal.SIGKILL  # the second: as a shell between us says it
        if returncode not in killed or self._is_killed:
            return end
        if self._memory is None:
            return replace(end, loss=KILLED)
        if why := self._memory.out_of_memory():
            return replace(end, why=why, loss=OUT_OF_MEMORY)
        peak = self._memory.peak
        hint = f"nobody here sent the SIGKILL; the process had used up to {peak} of memory"
        return replace(end, loss=KILLED, hint=hint)


class RemoteProcess(Process):
    """A process of another machine; signals go as lines to the other end of ssh."""

    def __init__(
        self,
        task: Topology,
        popen: subprocess.Popen[bytes],
        host: str,
        private: Mapping[str, str] = NO_VARIABLES,
    ):
        super().__init__(task, popen)
        self.host = host
        self._memory = None  # it would be that of ssh
        self._written_secs = time.monotonic()
        self._kill_secs: float | None = None
        if popen.stdin is not None:
            os.set_blocking(popen.stdin.fileno(), False)  # an ssh that hangs must not hang us
            if private:
                with contextlib.suppress(OSError, AttributeError):
                    fcntl.fcntl(popen.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                self._write(json.dumps(dict(private)).encode() + b"\n")

    @property
    def is_stopped(self) -> bool:
        """False: it cannot be seen from here."""
        return False

    def send(self, signum: int) -> None:
        self._write(_ORDERS.get(signal.Signals(signum), b"TERM\n"))

    def kill(self) -> None:
        """The far end kills first; ssh itself ends a little later, and the closed connection kills."""
        self._is_killed = True
        if self._kill_secs is None:
            self._kill_secs = time.monotonic() + _REMOTE_KILL_SECS
            self._write(_ORDERS[signal.SIGKILL])

    def poll(self) -> ProcessExit | None:
        now = time.monotonic()
        if self._kill_secs is not None and now >= self._kill_secs:
            kill_group(self.pid)
        elif now - self._written_secs >= KEEPALIVE_SECS:
            self._write(b"ALIVE\n")
        return super().poll()

    def _write(self, order: bytes) -> None:
        self._written_secs = time.monotonic()
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._popen.stdin.fileno(), order)

    def _exit(self, returncode: int) -> ProcessExit:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        end = super()._exit(_SIGNALS_OF_CODES.get(returncode, returncode))
        if returncode != ssh.EXIT_UNREACHABLE:
            return end
        why = f"lost its machine: cannot reach host {self.host} (ssh ended with {returncode})"
        return replace(end, why=why, loss=OUTSIDE)


def check_program(program: str, cure: str) -> None:
    """Raises UsageError for a program that is not there or cannot be run."""
    if shutil.which(program) is None:
        where = "cannot be run" if os.path.exists(program) else "was not found"
        raise UsageError(f"the command {quoted(program)} {where}; {cure}")


def start_process(
    command: Sequence[str],
    task: Topology,
    *,
    output: int,
    errors: int,
    environ: Mapping[str, str],
    private: Mapping[str, str] = NO_VARIABLES,
    host: str | None = None,
    ssh_options: ssh.SshOptions | None = None,
) -> Process:
    """Starts the command as one task of a cluster.

    Args:
      output, errors: file descriptors for its stdout and stderr.
      environ: variables beside TF_CONFIG, which a task of an empty cluster does not get.
      private: variables that never appear on a command line.
      host: target of ssh; None for this machine.
    """
    variables = {**environ, **({"TF_CONFIG": task.tf_config()} if task.tasks else {})}
    if host is None:
        outer = {k: v for k, v in os.environ.items() if k not in JOB_VARIABLES}
        whole = {**outer, **variables, **private, "PYTHONUNBUFFERED": "1"}
    else:
        command = ssh.ssh_command(
            command,
            host=host,
            environ=ssh.remote_environ(variables),
            directory=os.getcwd(),
            options=ssh_options,
            reads_environ=bool(private),
        )
        whole = dict(os.environ)
    popen = subprocess.Popen(
        command,
        env=whole,
        stdin=subprocess.DEVNULL if host is None else subprocess.PIPE,
        stdout=output,
        stderr=errors,
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509 (it only calls into C)
    )
    return Process(task, popen) if host is None else RemoteProcess(task, popen, host, private)
