"""Python programs for tests, forked from a warm server if the result is the same.

process = processes.start([sys.executable, "-c", "import ctl"], env=environment())
done = processes.run([sys.executable, "-m", "models.mnist"], env=environment())

Both accept the arguments of `subprocess.Popen`. A program is forked from a server that has imported
TensorFlow. `subprocess` starts it if it is not a Python program, if variables differ that imports
read, or if it is a tool of `ctl`. The launcher is forked too, and then forks its workers.
"""

import atexit
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import warm_server

ROOT = Path(__file__).parents[2]
TIMEOUT_SECS = 600  # as in conftest.py
_OPTIONS = {"stdin", "stdout", "stderr", "env", "cwd", "text", "bufsize", "start_new_session"}


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """Starts a process as `subprocess.Popen(command, **options)`, forked from a server if possible.

    A process with a coverage measurement is not forked: its record starts with the interpreter.
    """
    environ = options.get("env") or os.environ
    is_plain = options.keys() <= _OPTIONS and "COVERAGE_PROCESS_START" not in environ
    if is_plain and _is_ours(command) and _fits(environ):
        return _Forked(command, **options)
    return subprocess.Popen(command, **options)


def python_script(text: str) -> str:
    """Returns a script for this interpreter. Its path may have a space, unlike in a `#!` line."""
    return f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n{text}"


def run(
    command: Sequence[str], *, timeout=TIMEOUT_SECS, text=True, **options
) -> subprocess.CompletedProcess:
    """Runs a command as `subprocess.run` and captures both outputs as text."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with start(command, text=text, **streams) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def words_of(pid: int) -> list[str]:
    """Returns the command of a running process, or [] if it has ended."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    except OSError:
        return []


def variables_of(pid: int) -> dict[str, str]:
    """Returns the environment that a running process was started with, or {} if it has ended."""
    try:
        texts = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        return {}
    return dict(text.split("=", 1) for text in texts if "=" in text)


def _is_ours(command: Sequence[str]) -> bool:
    first, second, *_ = [*map(os.fspath, command[1:]), "", ""]
    if os.fspath(command[0]) != sys.executable:
        return False
    if first == "-m":
        is_launcher = warm_server.is_launcher(second, [*map(os.fspath, command[3:4])])
        return is_launcher or second.partition(".")[0] != "ctl"
    return first == "-c" or first.endswith(".py")


def _fits(environ: Mapping[str, str]) -> bool:
    path = environ.get("PYTHONPATH", "").split(os.pathsep)
    own_variables, server_variables = map(warm_server.read_by_imports, (environ, _server_environ()))
    return path[0] == str(ROOT) and own_variables == server_variables


def _server_environ() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in warm_server.READ_LATER}
    return {**clean, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class _Server:
    """A server that starts with the first request to any server and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._environ: dict[str, str] = {}

    def request(self, request: Mapping, streams: Sequence[int]) -> tuple[socket.socket, int]:
        """Starts a program. Returns a socket that reports its end, and its process id."""
        if self._process is None:
            for server in _servers:
                server._start()
        ours, theirs = socket.socketpair()
        with theirs:
            text = json.dumps(request).encode()
            socket.send_fds(self._control, [text], [*streams, theirs.fileno()])
        number = ours.recv(warm_server.CODE.size, socket.MSG_WAITALL)
        assert number, "the warm server has ended: run tests/programs/warm_server.py 0 to see why"
        return ours, warm_server.CODE.unpack(number)[0]

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, warm_server.MAX_REQUEST_BYTES)
        with theirs:
            command = [sys.executable, warm_server.__file__, str(theirs.fileno())]
            command, environ = warm_server.with_room(command, _server_environ())
            self._process = subprocess.Popen(
                command, env=environ, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        atexit.register(self._end)

    def _end(self) -> None:
        assert self._process
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# Two servers in turn: their hash seeds differ, so workers of one job order sets differently. They start
# together: otherwise the second worker of the first job would start seconds after the first one.
_servers = [_Server(), _Server()]
_next_server = itertools.cycle(_servers)
_starting = threading.Lock()


class _Forked(subprocess.Popen):
    """A child of a server. It has the pipes of Popen; the server starts it and waits for it."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *remaining_arguments
    ):
        """Requests the start from the server instead of forking."""
        _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *options = remaining_arguments
        first, second, *_ = [*map(os.fspath, args[1:]), ""]
        is_file = not first.startswith("-")
        arguments = [*map(os.fspath, args[2 if is_file else 3 :])]
        request = {
            "kind": "file" if is_file else first,
            "program": first if is_file else second,
            "arguments": arguments,
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or os.getcwd()),
            "start_new_session": bool(options[5]),
        }
        streams = [stream if stream != -1 else i for i, stream in enumerate((p2cread, c2pwrite, errwrite))]
        self._reading = threading.Lock()
        try:
            with _starting:
                self._end, self.pid = next(_next_server).request(request, streams)
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        self._child_created = True

    def _internal_poll(self, *_, **__):
        self._read(0)
        return self.returncode

    def _wait(self, timeout):
        self._read(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _poll_end(self, timeout_secs):
        """Returns whether the exit code has arrived, after at most `timeout_secs`, or None for no limit."""
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        return bool(poller.poll(None if timeout_secs is None else 1000 * timeout_secs))

    def _read(self, timeout_secs):
        """Receives the exit code if it arrives within the timeout. The server may then reap the process."""
        if self.returncode is None:
            self._poll_end(timeout_secs)
        with self._reading:
            if self.returncode is None and self._poll_end(0):
                text = self._end.recv(warm_server.CODE.size, socket.MSG_WAITALL)
                assert text, "the warm server has ended before the process"
                (self.returncode,) = warm_server.CODE.unpack(text)
                self._end.close()
