"""Processes of another machine, all started over one ssh connection per host.

    connection = HostConnection("host2", SshOptions())
    process = connection.start(command, task, environ, output=1, errors=2)
    connection.poll(); process.poll()        # regularly; a ProcessExit once the process has ended
    connection.close()                       # after the last process has ended

One connection is faster than one per process, and sshd refuses connections at random when more than ten
begin at the same time (MaxStartups). A thread reads the frames of `ctl.launch.remote` and writes the output
of each process to its file descriptors; another thread sends orders and keepalives.
"""

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from ctl.distribute.topology import Topology
from ctl.errors import EXIT_USAGE
from ctl.launch import ssh
from ctl.launch.process import Process, ProcessExit
from ctl.launch.process_tree import die_with_parent, kill_group
from ctl.launch.remote import GREETING, KEEPALIVE_SECS, READY
from ctl.launch.restart_policy import ERROR, OUTSIDE, REFUSED

_KILL_SECS = 2.0  # for the remote end to kill a process
_CLOSE_SECS = 2.0  # for ssh to end after the last process
_READY_SECS = 120.0  # for the remote end to start, with modules on a slow disk
_MAX_ERROR_BYTES = 65536
_MAX_CONNECTS = 6  # while sshd refuses connections before the login
_CONNECT_PAUSE_SECS = (0.5, 2.0)


class RemoteProcess(Process):
    """A process of another machine. Signals are sent over the connection of its host."""

    def __init__(
        self, task: Topology, connection: "HostConnection", number: int, *, output: int, errors: int
    ):
        """Duplicates the file descriptors, which the reader thread writes to."""
        super().__init__(task, connection.pid, host=connection.host)
        self._connection = connection
        self._number = number
        self._descriptors = {1: os.dup(output), 2: os.dup(errors)}
        self._has_ended = False
        self._exit: ProcessExit | None = None
        self._kill_secs: float | None = None
        self._lock = threading.Lock()

    @property
    def has_ended(self) -> bool:
        """True if the process had ended at the last `poll`."""
        return self._has_ended

    @property
    def is_stopped(self) -> bool:
        """False: the state of a process of another machine is not visible."""
        return False

    def send(self, signum: int) -> None:
        """Sends a signal over the connection. A process that has not started is canceled instead."""
        if self._connection.is_ready:
            self._connection.send({"signal": self._number, "signum": int(signum)})
        else:
            self._cancel(signum)

    def kill(self) -> None:
        """Requests SIGKILL for the process and its group. Later calls have no effect."""
        self._is_killed = True
        if not self._connection.is_ready:
            self._cancel(signal.SIGKILL)
        elif self._kill_secs is None:
            self._kill_secs = time.monotonic() + _KILL_SECS
            self._connection.send({"kill": self._number})

    def poll(self) -> ProcessExit | None:
        """Returns the exit, or None while the process runs. A kill without an answer counts as an exit."""
        if self._exit is None and self._kill_secs is not None and time.monotonic() >= self._kill_secs:
            self.record_exit(-signal.SIGKILL)  # the connection is slow or lost; its end kills the process
        self._has_ended = self._exit is not None
        return self._exit

    def write(self, stream: int, data: bytes) -> None:
        """Copies output to the file descriptor of a stream. Called by the reader thread."""
        with contextlib.suppress(OSError, KeyError):
            while data:
                data = data[os.write(self._descriptors[stream], data) :]

    def record_exit(self, returncode: int, reason: str = "", loss: str | None = None) -> None:
        """Records the end of the process. Only the first call counts."""
        with self._lock:
            if self._exit is not None:
                return
            process_exit = self.build_exit(returncode)
            descriptors, self._descriptors = self._descriptors, {}
            for descriptor in descriptors.values():
                os.close(descriptor)
            self._exit = replace(process_exit, description=reason, loss=loss) if loss else process_exit

    def record_error(self, text: str, returncode: int, reason: str, loss: str) -> None:
        """Writes a text to the stderr of the process, and records its end."""
        self.write(2, text.rstrip().encode() + b"\n")
        self.record_exit(returncode, reason, loss)

    def _cancel(self, signum: int) -> None:
        """Cancels a process that has not started, because ssh is still connecting."""
        self._is_killed = True
        self._connection.send({"kill": self._number})
        self.record_exit(-signum)


class HostConnection:
    """One ssh connection, with the processes that were started over it.

    Attributes:
      host: Target of ssh.
      pid: Process ID of ssh.
      is_ready: True once the remote end has started.
    """

    def __init__(self, host: str, options: ssh.SshOptions | None = None):
        """Starts ssh. Raises OSError if that fails."""
        self.host = host
        self.is_ready = False
        self._command = ssh.ssh_command(host, options)
        self._processes: dict[int, RemoteProcess] = {}
        self._starts: dict[int, bytes] = {}  # orders, which another connection repeats
        self._refusal = ""  # of the remote end
        self._login_output = b""  # output of the login shell before the remote end starts
        self._close_secs: float | None = None
        self._num_connects = 0
        self._connect_secs: float | None = None  # of the next attempt to connect
        self._connect()

    @property
    def has_ended(self) -> bool:
        """True once ssh has ended permanently, as of the last `poll`."""
        return self._popen.returncode is not None and self._connect_secs is None

    @property
    def is_idle(self) -> bool:
        """True if no process runs over this connection."""
        return all(process.has_ended for process in self._processes.values())

    def start(
        self,
        command: Sequence[str],
        task: Topology,
        environ: Mapping[str, str],
        *,
        output: int,
        errors: int,
    ) -> RemoteProcess:
        """Starts a process in the current directory, as soon as the connection is ready."""
        number = len(self._starts)
        process = RemoteProcess(task, self, number, output=output, errors=errors)
        order = {
            "start": number,
            "command": list(command),
            "environ": ssh.remote_environ(environ),
            "directory": os.getcwd(),
            "is_merged": output == errors,
        }
        self._processes[number] = process
        self._starts[number] = json.dumps(order).encode()
        self._orders.put(self._starts[number])
        return process

    def send(self, order: Mapping[str, Any]) -> None:
        """Sends an order; a no-op once the connection has ended."""
        self._orders.put(json.dumps(order).encode())

    def close(self) -> None:
        """Ends the connection. `poll` kills an ssh that does not end in time."""
        if self._close_secs is None:
            self._orders.put(None)
            self._connect_secs = None
            self._close_secs = time.monotonic() + (_CLOSE_SECS if self.is_ready else 0.0)

    def kill(self) -> None:
        """Kills ssh. The remote end then kills its processes."""
        kill_group(self.pid)

    def poll(self) -> None:
        """Reaps ssh, and records the ends of the processes that are lost with it."""
        now_secs = time.monotonic()
        if self._connect_secs is not None:
            if now_secs >= self._connect_secs:
                self._connect_secs = None
                self._connect()
            return
        returncode = self._popen.poll()
        if returncode is not None:
            kill_group(self.pid)
            self._reader.join(_KILL_SECS)
            self._record_end(returncode)
            if self.has_ended:
                self._stderr_file.close()
        elif self._close_secs is not None and now_secs >= self._close_secs:
            self.kill()
        elif not self.is_ready and now_secs >= self._ready_by_secs:
            self._refusal = (
                f"{self.host} did not start the job's processes within {_READY_SECS:g} s; expected a login "
                "shell whose startup files, such as ~/.bashrc, end and read nothing from stdin"
            )
            self.kill()

    def _connect(self) -> None:
        self._num_connects += 1
        self._ready_by_secs = time.monotonic() + _READY_SECS
        self._stderr_file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the connection)
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._orders.put(GREETING)
        for number, order in self._starts.items():
            if not self._processes[number].has_ended:
                self._orders.put(order)
        self._popen = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr_file,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 (it only calls into C)
        )
        self.pid = self._popen.pid
        self._reader = threading.Thread(
            target=self._read, args=[self._popen.stdout], name="ssh-reader", daemon=True
        )
        writer = threading.Thread(
            target=_write_orders, args=[self._popen.stdin, self._orders], name="ssh-writer", daemon=True
        )
        self._reader.start()
        writer.start()

    def _read(self, stdout: IO[bytes]) -> None:
        """Reads frames until the connection ends."""
        with contextlib.suppress(OSError, ValueError), stdout:
            while not (line := stdout.readline(_MAX_ERROR_BYTES)).endswith(READY):
                if not line:
                    return
                self._login_output = (self._login_output + line)[-_MAX_ERROR_BYTES:]
            self.is_ready = True
            while line := stdout.readline():
                frame = json.loads(line)
                data = stdout.read(frame["bytes"]) if "bytes" in frame else b""
                self._receive(frame, data)

    def _receive(self, frame: Mapping[str, Any], data: bytes) -> None:
        if "refused" in frame:
            self._refusal = frame["refused"]
            return
        process = self._processes[frame["id"]]
        if "stream" in frame:
            process.write(frame["stream"], data)
        elif "error" in frame:
            reason = f"cannot be started: {frame['error']}"
            process.record_error(f"ctl launch: {frame['error']}", EXIT_USAGE, reason, ERROR)
        else:
            process.record_exit(frame["exit"])

    def _record_end(self, returncode: int) -> None:
        running = [process for process in self._processes.values() if not process.poll()]
        if not running:
            return
        stderr = self._read_stderr()
        error = self._refusal or ssh.error_line(stderr)
        is_outside = returncode == ssh.EXIT_UNREACHABLE and not self._refusal
        is_refused = is_outside and not self.is_ready and ssh.is_refused(stderr)
        if is_refused and self._num_connects < _MAX_CONNECTS:
            self._connect_secs = time.monotonic() + random.uniform(*_CONNECT_PAUSE_SECS)
            return
        ssh_exit = f"ssh ended with {ProcessExit(running[0].task, returncode, 0.0)}"
        had_started = self.is_ready and not self._refusal
        code, loss = ssh.EXIT_UNREACHABLE, OUTSIDE
        if had_started:
            code = returncode if returncode < 0 else code
            reason = f"lost its machine {self.host}: {error or ssh_exit}"
        elif not self._refusal and (returncode < 0 or (is_outside and not ssh.is_permanent(stderr))):
            reason = f"cannot be started, because host {self.host} cannot be reached: {error or ssh_exit}"
        else:
            code, loss = EXIT_USAGE, REFUSED
            reason = (
                f"cannot be started on {self.host}: {self._describe_failure(error, ssh_exit, is_outside)}"
            )
        for process in running:
            process.record_error(
                stderr if stderr.strip() else f"ctl launch: it {reason}", code, reason, loss
            )

    def _describe_failure(self, error: str, ssh_exit: str, is_outside: bool) -> str:
        if self._refusal:
            return error
        if is_outside:
            options = "-o BatchMode=yes -o StrictHostKeyChecking=yes"
            return f"{error}; expected that `ssh {options} {self.host} true` succeeds"
        error = (
            error
            or ssh.error_line(self._login_output.decode(errors="replace"))
            or "no error message was received"
        )
        return f"{error} ({ssh_exit}); expected the files {ssh.installation_paths()} on that host"

    def _read_stderr(self) -> str:
        with contextlib.suppress(OSError, ValueError), self._stderr_file:
            self._stderr_file.seek(max(0, self._stderr_file.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
            return self._stderr_file.read().decode(errors="replace")
        return ""


def _write_orders(stdin: IO[bytes], orders: "queue.SimpleQueue[bytes | None]") -> None:
    """Sends orders until None, and a keepalive after each pause of `KEEPALIVE_SECS`."""
    with contextlib.suppress(OSError, ValueError), stdin:
        while True:
            try:
                order = orders.get(timeout=KEEPALIVE_SECS)
            except queue.Empty:
                order = b"{}"
            if order is None:
                return
            stdin.write(order + b"\n")
            stdin.flush()
