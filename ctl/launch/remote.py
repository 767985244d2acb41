"""Remote end of an ssh connection: starts processes on one machine, and kills them with the connection.

    exit_code = serve_launcher()          # reads orders from stdin, writes frames to stdout

An order is a line of JSON, after the line `GREETING`: `{"start": 0, "command": [...], "environ": {...},
"directory": "/work", "is_merged": true}`, `{"signal": 0, "signum": 15}`, `{"kill": 0}` for a whole process
group, or `{}` as a keepalive. A frame is a line of JSON, after the line `READY`: `{"id": 0, "exit": -9}`,
`{"id": 0, "error": "..."}` for a process that cannot be started, `{"refused": "..."}`, or
`{"id": 0, "stream": 1, "bytes": 512}`, followed by the output of a process. When stdin ends, or no order
arrives for `SILENCE_SECS`, all process groups are killed.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from ctl.errors import EXIT_DONE, EXIT_USAGE
from ctl.launch.process_tree import die_with_parent, kill_group

GREETING = b"ctl launch"
READY = b"\0ctl remote\n"
KEEPALIVE_SECS = 5.0
SILENCE_SECS = 120.0  # an interrupted network does not close a connection
_POLL_MSECS = 100
_READ_BYTES = 65536
_MAX_PENDING_BYTES = 2**20  # of frames; above it the output of processes is not read


def serve_launcher(orders: int = 0, frames: int = 1, silence_secs: float = SILENCE_SECS) -> int:
    """Serves one launcher until the connection ends. Returns an exit code.

    Args:
      orders: File descriptor of the orders.
      frames: File descriptor of the frames.
      silence_secs: Time without any order after which the connection counts as lost.
    """
    server = _Server(orders, frames, silence_secs)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: server.send_to_all(signal.SIGTERM))
    return server.run()


class _Child:
    """One process and the pipes of its output."""

    def __init__(self, order: Mapping[str, Any]):
        """Starts the process. Raises OSError or ValueError if that fails."""
        self.stream_by_pipe: dict[int, int] = {}
        self.popen = subprocess.Popen(
            order["command"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if order["is_merged"] else subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **order["environ"]},
            cwd=order["directory"],
            preexec_fn=die_with_parent(),  # noqa: PLW1509 (this program has no threads)
        )
        for stream, pipe in ((1, self.popen.stdout), (2, self.popen.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self.stream_by_pipe[pipe.fileno()] = stream

    def read(self, pipe: int) -> bytes | None:
        """Returns available output, None at its end, empty if there is none yet."""
        try:
            return os.read(pipe, _READ_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def close(self, pipe: int) -> None:
        """Closes one pipe."""
        stream = self.stream_by_pipe.pop(pipe)
        file = self.popen.stdout if stream == 1 else self.popen.stderr
        if file is not None:
            file.close()


class _Server:
    """The processes of one connection."""

    def __init__(self, orders: int, frames: int, silence_secs: float):
        self._orders = orders
        self._frames = frames
        self._silence_secs = silence_secs
        self._children: dict[int, _Child] = {}
        self._received = b""
        self._pending = bytearray(READY)
        self._is_greeted = False
        self._is_connected = True
        self._exit_code = EXIT_DONE
        self._received_secs = time.monotonic()

    def run(self) -> int:
        os.set_blocking(self._orders, False)
        os.set_blocking(self._frames, False)
        try:
            while self._is_connected:
                self._poll()
        finally:
            for child in self._children.values():
                kill_group(child.popen.pid)
        return self._exit_code

    def send_to_all(self, signum: int) -> None:
        for child in list(self._children.values()):
            with contextlib.suppress(OSError):
                child.popen.send_signal(signum)

    def _poll(self) -> None:
        poll = select.poll()
        poll.register(self._orders, select.POLLIN)
        if self._pending:
            poll.register(self._frames, select.POLLOUT)
        process_by_pipe = {}
        if len(self._pending) < _MAX_PENDING_BYTES:
            process_by_pipe = {
                pipe: number for number, child in self._children.items() for pipe in child.stream_by_pipe
            }
        for pipe in process_by_pipe:
            poll.register(pipe, select.POLLIN)
        active = [descriptor for descriptor, _ in poll.poll(_POLL_MSECS)]
        for pipe in process_by_pipe.keys() & active:
            self._forward_output(process_by_pipe[pipe], pipe)
        if self._orders in active:
            self._read_orders()
        for number, child in list(self._children.items()):
            if child.popen.poll() is not None:
                self._reap_child(number, child)
        self._write()
        if time.monotonic() - self._received_secs > self._silence_secs:
            self._is_connected = False

    def _forward_output(self, number: int, pipe: int) -> bool:
        """Moves available output of a process to the frames. Returns False if there was none."""
        child = self._children[number]
        data = child.read(pipe)
        if data:
            self._send({"id": number, "stream": child.stream_by_pipe[pipe], "bytes": len(data)}, data)
        elif data is None:
            child.close(pipe)
        return bool(data)

    def _reap_child(self, number: int, child: _Child) -> None:
        kill_group(child.popen.pid)
        for pipe in list(child.stream_by_pipe):
            while self._forward_output(number, pipe):
                pass
            if pipe in child.stream_by_pipe:  # a process of another session holds it
                child.close(pipe)
        del self._children[number]
        self._send({"id": number, "exit": child.popen.returncode})

    def _send(self, frame: Mapping[str, Any], data: bytes = b"") -> None:
        self._pending += json.dumps(frame).encode() + b"\n" + data

    def _write(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(self._frames, self._pending[:_READ_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self._is_connected = False

    def _read_orders(self) -> None:
        try:
            data = os.read(self._orders, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._is_connected = False
            return
        self._received_secs = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            if not self._is_greeted:
                self._is_greeted = line == GREETING
                if not self._is_greeted:
                    self._reject_input()
                    return
            elif line:
                self._execute_order(json.loads(line))

    def _reject_input(self) -> None:
        """Ends the connection: another program has read the beginning of the input."""
        self._send({
            "refused": f"a program on {os.uname().nodename} read the beginning of the launcher's input; "
            "expected that startup files of the login shell, such as ~/.bashrc, read nothing from stdin. "
            "Start such commands with `</dev/null`, or in interactive shells only"
        })  # fmt: skip
        os.set_blocking(self._frames, True)
        self._write()
        self._is_connected, self._exit_code = False, EXIT_USAGE

    def _execute_order(self, order: Mapping[str, Any]) -> None:
        if "start" in order:
            self._start_child(order)
        elif "signal" in order and (child := self._children.get(order["signal"])):
            with contextlib.suppress(OSError):
                child.popen.send_signal(order["signum"])
        elif "kill" in order and (child := self._children.get(order["kill"])):
            kill_group(child.popen.pid)

    def _start_child(self, order: Mapping[str, Any]) -> None:
        try:
            self._children[order["start"]] = _Child(order)
        except (OSError, ValueError, IndexError) as e:
            self._send({"id": order["start"], "error": _start_error(order, e)})


def _start_error(order: Mapping[str, Any], error: Exception) -> str:
    hostname, directory, path = os.uname().nodename, order["directory"], order["environ"].get("PATH")
    if not os.path.isdir(directory):
        expected = "the same paths on all hosts"
        return f"the directory {directory!r} does not exist on {hostname}; expected {expected}"
    program = order["command"][0] if order["command"] else ""
    if os.path.dirname(program) or shutil.which(program, path=path):
        return f"the command {program!r} cannot be run on {hostname} ({error}); expected an executable file"
    return f"the command {program!r} was not found on {hostname}; expected a program on PATH={path}"
