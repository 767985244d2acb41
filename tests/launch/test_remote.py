"""The remote end of an ssh connection, started on this machine, and the classification of ssh's errors."""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
from conftest import ROOT
from ctl.launch import remote, ssh
from launching import is_alive
from polling import wait_until

TIMEOUT_SECS = 600


@contextmanager
def serving(silence_secs=60.0):
    """Starts a remote end without PYTHONPATH; yields the process and a function that sends a command."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from ctl.launch import remote; "
    with subprocess.Popen(
        [sys.executable, "-c", program + f"sys.exit(remote.serve_launcher(silence_secs={silence_secs}))"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
    ) as process:  # fmt: skip

        def send(order):
            process.stdin.write((json.dumps(order) if isinstance(order, dict) else order).encode() + b"\n")
            process.stdin.flush()

        try:
            yield process, send
        finally:
            process.kill()


def start(number, *command, **environ):
    return {"start": number, "command": command, "environ": environ, "directory": "/", "is_merged": False}


def read_frame(process):
    """Returns the next frame with its data."""
    fields = json.loads(process.stdout.readline())
    return {**fields, "data": process.stdout.read(fields["bytes"])} if "bytes" in fields else fields


def test_exit_codes_signals_and_output_are_sent_as_frames():
    with serving() as (process, send):
        send(remote.GREETING.decode())
        assert process.stdout.readline() == remote.READY
        send(start(0, "sh", "-c", "echo out; echo err >&2; exit 255"))
        frames = [read_frame(process) for _ in range(3)]
        assert sorted(f["data"] for f in frames[:2]) == [b"err\n", b"out\n"]
        assert frames[2] == {"id": 0, "exit": 255}
        send(start(1, "sleep", "1000"))
        send({"signal": 1, "signum": 15})
        assert read_frame(process) == {"id": 1, "exit": -15}
        send(start(2, "sleep", "1000"))
        send({"kill": 2})
        assert read_frame(process) == {"id": 2, "exit": -9}


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (start(0, "nowhere", PATH="/bin"), "the command 'nowhere' was not found on"),
        (start(0, "/etc/passwd"), "the command '/etc/passwd' cannot be run on"),
        ({**start(0, "true"), "directory": "/nowhere"}, "the directory '/nowhere' does not exist on"),
    ],
)
def test_a_process_that_cannot_be_started_is_an_error_with_its_reason(order, error):
    with serving() as (process, send):
        send(remote.GREETING.decode())
        send(order)
        assert process.stdout.readline() == remote.READY
        assert error in read_frame(process)["error"]


def test_large_output_arrives_completely_before_the_exit():
    with serving() as (process, send):
        send(remote.GREETING.decode())
        process.stdout.readline()
        send(start(0, sys.executable, "-c", "print('x' * 9_999_999)"))
        size = 0
        while "exit" not in (received := read_frame(process)):
            size += received["bytes"]
        assert (size, received["exit"]) == (10_000_000, 0)


@pytest.mark.parametrize("silence_secs", [5.0, 60.0])
def test_processes_end_with_the_connection_or_after_silence(silence_secs):
    with serving(silence_secs) as (process, send):
        send(remote.GREETING.decode())
        process.stdout.readline()
        send(start(0, "sh", "-c", "sleep 1000 & echo $$ $!; wait"))
        pids = [int(pid) for pid in read_frame(process)["data"].split()]
        if silence_secs == 60.0:
            process.stdin.close()
        assert process.wait(TIMEOUT_SECS) == 0
        wait_until(lambda: not any(map(is_alive, pids)))


def test_input_that_another_program_has_read_is_refused():
    with serving() as (process, send):
        send(start(0, "true"))
        process.stdout.readline()
        assert "startup files of the login shell" in read_frame(process)["refused"]
        assert process.wait(TIMEOUT_SECS) == 2


@pytest.mark.parametrize(
    ("text", "error", "is_permanent", "is_refused"),
    [
        ("h: Permission denied (publickey).\r\n", "h: Permission denied (publickey)", True, False),
        ("@@@\nHost key verification failed.", "Host key verification failed", True, False),
        ("ssh: Could not resolve hostname h: Name or service not known", None, True, False),
        ("ssh: Could not resolve hostname h: Temporary failure in name resolution", None, False, False),
        ("ssh: connect to host h port 22: No route to host", None, False, False),
        ("kex_exchange_identification: read: Connection reset by peer\n", None, False, True),
        ("Connection closed by 10.0.0.1 port 22", None, False, True),
        ("", "", False, False),
    ],
)
def test_errors_of_ssh_are_classified(text, error, is_permanent, is_refused):
    assert ssh.error_line(text) == (text.strip() if error is None else error)
    assert (ssh.is_permanent(text), ssh.is_refused(text)) == (is_permanent, is_refused)
