"""One process of a job, on this machine or behind ssh; and how it ended.

    process = start(command, task, output=file.fileno(), environ={"CTL_ATTEMPT": "1"})
    process.send(signal.SIGTERM)
    process.poll()                -> an Exit once it has ended

A process of another machine takes signals as lines on the standard input of ssh.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ctl.distribute import cluster
from ctl.distribute.cluster import Cluster
from ctl.launch import ssh
from ctl.launch.groups import die_with_parent, kill_group, state
from ctl.launch.memory import Memory
from ctl.launch.remote import ALIVE_SECS
from ctl.launch.restart_policy import ERROR, KILLED, OUT_OF_MEMORY, OUTSIDE
from ctl.launch.roles import name

_POLL_SECS = 0.05
_LOOK_SECS = 0.5  # between two looks at the memory of a process
_KILL_SECS = 10.0  # a killed process that is not gone by then is left to the kernel
_PIPE_BYTES = 2**20  # for an environment; the kernel's own measure is 64 KiB
_NOTHING: Mapping[str, str] = {}
_KILL_ORDER_SECS = 2.0  # for a far process to be killed by its own end of the connection
_ORDERS = {signal.SIGTERM: b"TERM\n", signal.SIGINT: b"INT\n", signal.SIGKILL: b"KILL\n"}
NOT_OURS = frozenset({  # what an outer job said to us is not about this one
    *cluster.VARIABLES, "CTL_RESTART_REASON", "CTL_ATTEMPT", "CTL_HEARTBEAT", "CTL_HVD_SECRET",
    "CTL_HVD_RENDEZVOUS", "CTL_HVD_WORKER", "CTL_HVD_HOST", "HOROVOD_ELASTIC", "HOROVOD_RANK",
    "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME",
})  # fmt: skip
_BY_SIGNALS = {
    128 + n: -n
    for n in (signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
}


@dataclass(frozen=True)
class Exit:
    """How one process ended; `returncode` is negative for a signal, as `subprocess` has it.

    `why` says in words that follow its name what the code does not, as of one that was hung, and
    `silent_secs` how long that had been; `loss` is a word of `retrying`, `hint` what else is known.
    """

    task: Cluster
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
        return f"{name(self.task)} " + (self.why or f"failed: {self}")

    def __str__(self) -> str:
        return f"it {self.why}" if self.why else self.signal_name or f"exit code {self.returncode}"


class Process:
    """A process of this machine, the leader of a session of its own."""

    def __init__(self, task: Cluster, popen: subprocess.Popen):
        self.task = task
        self.pid = popen.pid
        self._popen = popen
        self._started_secs = time.monotonic()
        self._memory: Memory | None = Memory(popen.pid)
        self._looked_secs = 0.0
        self._is_killed = False  # by us

    @property
    def has_ended(self) -> bool:
        """As of the last `poll`."""
        return self._popen.returncode is not None

    @property
    def is_stopped(self) -> bool:
        """True for one that does not run because of SIGSTOP, Ctrl-Z or a debugger."""
        return state(self.pid) in ("T", "t")

    def send(self, signum: int) -> None:
        """A signal to the process itself, not to what it has started."""
        self._popen.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL to it and all in its group."""
        self._is_killed = True
        kill_group(self.pid)

    def poll(self) -> Exit | None:
        """How it ended, and then nothing of its group is left; None while it runs."""
        returncode = self._popen.poll()
        if returncode is None:
            is_due = time.monotonic() - self._looked_secs >= _LOOK_SECS
            if is_due and self._memory is not None:
                self._looked_secs = time.monotonic()
                self._memory.look()
            return None
        kill_group(self.pid)
        return self._exit(returncode)

    def _exit(self, returncode: int) -> Exit:
        end = Exit(self.task, returncode, time.monotonic() - self._started_secs)
        killed = -signal.SIGKILL, 128 + signal.SIGKILL  # the second: as a shell between us says it
        if returncode not in killed or self._is_killed:
            return end
        if self._memory is None:
            return replace(end, loss=KILLED)
        if why := self._memory.killed():
            return replace(end, why=why, loss=OUT_OF_MEMORY)
        hint = f"nobody here sent the SIGKILL; the process had used up to {self._memory.said} of memory"
        return replace(end, loss=KILLED, hint=hint)


class FarProcess(Process):
    """A process of another machine: its signals are lines to the other end of ssh."""

    def __init__(
        self, task: Cluster, popen: subprocess.Popen, host: str, told: Mapping[str, str] = _NOTHING
    ):
        super().__init__(task, popen)
        self._memory = None  # of ssh, else
        self._host = host
        self._told_secs = time.monotonic()
        self._kill_secs: float | None = None
        if popen.stdin is not None:
            os.set_blocking(popen.stdin.fileno(), False)  # an ssh that hangs must not hang us
            if told:
                with contextlib.suppress(OSError, AttributeError):
                    fcntl.fcntl(popen.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                self._tell(json.dumps(dict(told)).encode() + b"\n")

    @property
    def is_stopped(self) -> bool:
        """Nobody can tell from here."""
        return False

    def send(self, signum: int) -> None:
        self._tell(_ORDERS.get(signal.Signals(signum), b"TERM\n"))

    def kill(self) -> None:
        """Over there first; ssh itself a little later, and then the closed connection kills."""
        self._is_killed = True
        if self._kill_secs is None:
            self._kill_secs = time.monotonic() + _KILL_ORDER_SECS
            self._tell(_ORDERS[signal.SIGKILL])

    def poll(self) -> Exit | None:
        now = time.monotonic()
        if self._kill_secs is not None and now >= self._kill_secs:
            kill_group(self.pid)
        elif now - self._told_secs >= ALIVE_SECS:
            self._tell(b"ALIVE\n")
        return super().poll()

    def _tell(self, order: bytes) -> None:
        self._told_secs = time.monotonic()
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._popen.stdin.fileno(), order)

    def _exit(self, returncode: int) -> Exit:
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        if returncode == ssh.EXIT_UNREACHABLE:
            end = super()._exit(returncode)
            why = f"lost its machine: cannot reach host {self._host} (ssh ended with {returncode})"
            return Exit(self.task, returncode, end.lived_secs, why, loss=OUTSIDE)
        return super()._exit(_BY_SIGNALS.get(returncode, returncode))


def start(
    command: Sequence[str], task: Cluster, *, output: int, environ: Mapping[str, str],
    errors: int = subprocess.STDOUT, private: Mapping[str, str] = _NOTHING,
    host: str | None = None, door: ssh.Door | None = None,
) -> Process:  # fmt: skip
    """Starts the command in the task's place, its output going to a file descriptor.

    Args:
      environ: what it is told beside TF_CONFIG, which a task without peers does not get.
      errors: another descriptor for its stderr.
      private: also told, and never on a command line.
      host: where, None for here; door: how ssh gets in there.
    """
    told = {**environ, **({"TF_CONFIG": task.tf_config()} if task.tasks else {})}
    outer = {k: v for k, v in os.environ.items() if k not in NOT_OURS}
    here = {**outer, **told, **private, "PYTHONUNBUFFERED": "1"}
    if host is not None:
        command = ssh.line(
            command, host=host, environ=ssh.passed_on(told), directory=os.getcwd(), door=door,
            is_told_more=bool(private),
        )  # fmt: skip
        here = dict(os.environ)
    popen = subprocess.Popen(
        command,
        env=here,
        stdin=subprocess.DEVNULL if host is None else subprocess.PIPE,
        stdout=output,
        stderr=errors,
        start_new_session=True,
        preexec_fn=die_with_parent(),  # noqa: PLW1509 (it only calls into C)
    )
    return Process(task, popen) if host is None else FarProcess(task, popen, host, private)


def end(
    chosen: Sequence[Process],
    look: Callable[[], object],
    grace_secs: float,
    signum: int = signal.SIGTERM,
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Sends `signum`, and SIGKILL after `grace_secs` or once `hurry()`; returns when all ended.

    Args:
      look: polls them, and whatever else its caller has to look after meanwhile.
    """
    for process in chosen:
        process.send(signum)
    wait(chosen, look, grace_secs, hurry)
    for process in chosen:
        if not process.has_ended:
            process.kill()
    wait(chosen, look, _KILL_SECS)


def wait(
    chosen: Sequence[Process],
    look: Callable[[], object],
    timeout_secs: float = _KILL_SECS,
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """Until all have ended, or it is time."""
    until_secs = time.monotonic() + timeout_secs
    look()
    while not all(p.has_ended for p in chosen):
        if time.monotonic() >= until_secs or hurry():
            return
        time.sleep(_POLL_SECS)
        look()
