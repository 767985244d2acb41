"""The far end of an ssh connection: runs one command and ends it with the connection.

    python -m ctl.launch.remote -- python train.py --steps=100

With `--environ` in front of "--" the first line on stdin is a JSON object of variables; on a command line
other users of the machine could read them. Further lines are orders: TERM and INT go to the process, KILL
to its whole group, ALIVE is a keepalive. When stdin ends, or nothing came for `SILENCE_SECS`, the group is
killed. The exit code is the command's, 128+n for signal n, and 254 for 255, which is ssh's own.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from ctl.errors import EXIT_USAGE
from ctl.launch.process_tree import die_with_parent, kill_group

KEEPALIVE_SECS = 5.0
SILENCE_SECS = 120.0  # a network that is cut closes no connection
_SELECT_SECS = 0.1
_SIGNALS = {b"TERM": signal.SIGTERM, b"INT": signal.SIGINT}


def main(argv: Sequence[str], orders: int = 0, silence_secs: float = SILENCE_SECS) -> int:
    """Runs the command after "--" until it ends or is ended; returns the exit code.

    Args:
      orders: file descriptor of the lines; silence_secs: without any for so long, the end.
    """
    words, environ = list(argv), dict(os.environ)
    if words[:1] == ["--environ"]:
        words = words[1:]
        variables = _read_environ(orders, silence_secs)
        if variables is None:
            return EXIT_USAGE
        environ |= variables
    words = words[1:] if words[:1] == ["--"] else words
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environ,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 (no threads here)
        )
    except (OSError, IndexError, ValueError) as e:
        print(f"ctl launch: {words[:1]} cannot be run on {os.uname().nodename}: {e}", flush=True)
        return EXIT_USAGE
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: _send_signal(child, signal.SIGTERM))
    _obey(child, orders, silence_secs)
    kill_group(child.pid)
    returncode = child.wait()
    return min(returncode, 254) if returncode >= 0 else 128 - returncode


def _read_environ(orders: int, silence_secs: float) -> dict[str, str] | None:
    """The variables of the first line; None when the connection ends before it does."""
    line, until_secs = b"", time.monotonic() + silence_secs
    while not line.endswith(b"\n"):  # byte by byte: what follows is an order
        if time.monotonic() > until_secs:
            return None
        if select.select([orders], [], [], _SELECT_SECS)[0]:
            byte = os.read(orders, 1)
            if not byte:
                return None
            line += byte
    return json.loads(line)


def _obey(child: subprocess.Popen[bytes], orders: int, silence_secs: float) -> None:
    """Returns when the process has ended, or its group is to be killed."""
    received_secs, rest = time.monotonic(), b""
    while child.poll() is None:
        if not select.select([orders], [], [], _SELECT_SECS)[0]:
            if time.monotonic() - received_secs > silence_secs:
                return
            continue
        data = os.read(orders, 4096)
        if not data:
            return
        received_secs = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == b"KILL":
                return
            if line in _SIGNALS:
                _send_signal(child, _SIGNALS[line])


def _send_signal(child: subprocess.Popen[bytes], signum: int) -> None:
    with contextlib.suppress(OSError):
        child.send_signal(signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
