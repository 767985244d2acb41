"""Ends process groups when the launcher is killed with -9: all in them, not their leaders alone.

    guard = Guard()
    guard.add(popen.pid)          # the leader of a group
    ...
    guard.remove(popen.pid)       # the group is gone
    guard.close()

A second small process reads the numbers from a pipe. When the pipe closes while it still knows a group,
we are dead, and it kills the group. This file is also that process's program, so it imports nothing of
ours.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The launcher's side. Nothing here raises: without a guard the kernel still ends the leaders."""

    def __init__(self):
        self._popen = None
        with contextlib.suppress(OSError):
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, close_fds=True,
            )  # fmt: skip

    def add(self, pid: int) -> None:
        """From now on the group of this leader ends with us."""
        self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """The group is gone; its number may soon be another's."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Ends the second process, and whatever group was not removed."""
        if self._popen is None or self._popen.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5.0)

    def _tell(self, line: str) -> None:
        if self._popen is not None and self._popen.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._popen.stdin.fileno(), line.encode())


def _main() -> None:
    groups: set[int] = set()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it has to outlive us
    for line in sys.stdin:
        pid = int(line[1:])
        if line[0] == "+":
            groups.add(pid)
        else:
            groups.discard(pid)
    for pid in groups:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main()
