"""What tells one process from another that has, or had, the same number."""

import os
import time
from pathlib import Path

_IMPORTED = time.time()


def process_mark(pid: int) -> str:
    """What tells this process from another that has or had its number: namespace/start.

    "" if it is gone or has ended, and where /proc does not tell.
    """
    ticks = _start_ticks(pid)
    return "" if ticks is None else f"{namespace()}/{ticks}"


def process_started() -> float:
    """Unix time, seconds, at which this process began: before its imports."""
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
        words = text.rpartition(")")[2].split()  # the name before may hold anything
        return None if words[0] in "ZX" else int(words[19])
    except (OSError, ValueError, IndexError):
        return None


def namespace() -> str:
    """Where process numbers are comparable: machines and containers of one host name differ in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):
        return ""
