"""Identification of processes, also if their numbers are reused."""

import os
import time
from pathlib import Path

_IMPORTED = time.time()


def process_mark(pid: int) -> str:
    """Returns "<PID namespace>/<start time>" of a process, which differs if its number is reused.

    Returns "" for a process that has ended, and on systems without /proc.
    """
    ticks = _start_ticks(pid)
    return "" if ticks is None else f"{pid_namespace()}/{ticks}"


def process_start_time() -> float:
    """Returns the Unix time (seconds) at which this process started, before its imports."""
    ticks = _start_ticks(os.getpid())
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    if ticks is None or boot_clock is None:
        return _IMPORTED
    age_secs = time.clock_gettime(boot_clock) - ticks / os.sysconf("SC_CLK_TCK")
    started = time.time() - age_secs
    return started if age_secs >= 0 and started <= _IMPORTED else _IMPORTED


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the name in brackets may contain blanks and brackets
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def pid_namespace() -> str:
    """Returns an identifier of the PID namespace, in which process numbers are unique, or "".

    It differs between machines and containers with the same host name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):
        return ""
