"""Processes and their groups: killed together, ended with whoever started them, looked at.

popen = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent())
state(popen.pid)              -> "S", "R", "T" (stopped), ... or "" when it is gone
kill_group(popen.pid)
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from ctl.errors import EXIT_FAILED

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def kill_group(pid: int) -> None:
    """SIGKILL to a process and all in its group; right after its end the number is still ours."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def die_with_parent() -> Callable[[], None] | None:
    """What a child does before it runs the command, so that a `kill -9` of us ends it too.

    Linux only: None elsewhere. It calls into C and nothing else, as is safe after a fork.
    """
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    parent_pid = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it was gone before the kernel knew of our wish
            os._exit(EXIT_FAILED)

    return in_child


def cpu_ticks() -> dict[int, int]:
    """Process group -> processor time that the processes in it have used, in clock ticks."""
    total: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = path.read_text(encoding="utf-8", errors="replace")
            words = text.rpartition(")")[2].split()  # from the state on
            total[int(words[2])] = total.get(int(words[2]), 0) + int(words[11]) + int(words[12])
    return total


def state(pid: int) -> str:
    """One letter from /proc, "T" for a stopped process; "" where there is none to be had."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[0]  # the name before may hold anything
    except (OSError, IndexError):
        return ""
