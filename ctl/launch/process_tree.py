"""Process groups of this machine: termination with the parent process, and statistics from /proc.

    popen = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent())
    Guard().add(popen.pid)           # a `kill -9` of this process now ends the whole group
    kill_group(popen.pid)

This file is also the guard's program. It has no access to packages and imports only the standard library.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_REAP_INTERVAL_SECS = 1.0
_ORPHAN_SECS = 2.0


def kill_group(pid: int) -> None:
    """Sends SIGKILL to a process and its group. Just after its end the ID is still reserved."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def die_with_parent() -> Callable[[], None] | None:
    """Returns a function for a child before `exec`, so that a `kill -9` of its parent ends it, too.

    Linux only: returns None elsewhere. The function only calls into C, as is safe after a fork.
    """
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    parent_pid = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent ended before the prctl call
            os._exit(1)

    return in_child


def process_state(pid: int) -> str:
    """Returns one letter from /proc, "T" for a stopped process, or "" if it cannot be read."""
    try:
        return _stat_fields(Path(f"/proc/{pid}/stat"))[0]
    except (OSError, IndexError):
        return ""


def tree_cpu_ticks(leaders: Iterable[int]) -> dict[int, int]:
    """Returns the processor time (clock ticks) of each leader with its group and its descendants.

    Children that have ended and were waited for count, so the time of a tree never decreases.
    """
    parents, groups, ticks = {}, {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat_fields(path)
            pid = int(path.parent.name)
            parents[pid], groups[pid] = int(fields[1]), int(fields[2])
            ticks[pid] = sum(map(int, fields[11:15]))
    total_ticks = {leader: 0 for leader in leaders if leader in ticks}
    for pid, process_ticks in ticks.items():
        leader = groups[pid]
        ancestor = pid
        while leader not in total_ticks and ancestor in parents:
            ancestor = leader = parents[ancestor]
        if leader in total_ticks:
            total_ticks[leader] += process_ticks
    return total_ticks


class OrphanReaper:
    """A reaper of orphans for the first process of a container, which inherits them.

    A child of another part of this program is left to that part: only processes that have been zombies
    for some seconds count as orphans.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._is_first = os.getpid() == 1
        self._clock = clock
        self._polled_secs = clock()
        self._zombies: dict[int, float] = {}  # pid -> time of its detection as a zombie

    def poll(self, children: Iterable[int]) -> None:
        """Reaps the orphans, at most once a second. `children` are waited for elsewhere."""
        now_secs = self._clock()
        if not self._is_first or now_secs - self._polled_secs < _REAP_INTERVAL_SECS:
            return
        self._polled_secs = now_secs
        zombies = _find_zombies(os.getpid()) - set(children)
        self._zombies = {pid: self._zombies.get(pid, now_secs) for pid in zombies}
        for pid, since_secs in self._zombies.items():
            if now_secs - since_secs >= _ORPHAN_SECS:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _find_zombies(parent: int) -> set[int]:
    zombies = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat_fields(path)
            if fields[0] == "Z" and int(fields[1]) == parent:
                zombies.add(int(path.parent.name))
    return zombies


def _stat_fields(path: Path) -> list[str]:
    """Returns the fields from the state on. The preceding name may contain any character."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


class Guard:
    """A second small process that kills the registered groups if the launcher is killed with -9.

    It reads their IDs from a pipe, which closes when the launcher ends. No method raises an error:
    without a guard the kernel still ends the leaders of the groups.
    """

    def __init__(self) -> None:
        self._popen = None
        with contextlib.suppress(OSError):
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                close_fds=True,
            )

    @property
    def pids(self) -> set[int]:
        """The process ID of the guard."""
        return set() if self._popen is None else {self._popen.pid}

    def add(self, pid: int) -> None:
        """Registers the group of this leader. It then ends with the launcher."""
        self._write(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Removes a group that has ended, because its ID may soon be reused."""
        self._write(f"-{pid}\n")

    def close(self) -> None:
        """Ends the second process, and each group that was not removed."""
        if self._popen is None or self._popen.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(5.0)

    def _write(self, line: str) -> None:
        if self._popen is not None and self._popen.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._popen.stdin.fileno(), line.encode())


def _run_guard() -> None:
    groups: set[int] = set()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # it has to outlive the launcher
    for line in sys.stdin:
        pid = int(line[1:])
        if line[0] == "+":
            groups.add(pid)
        else:
            groups.discard(pid)
    for pid in groups:
        kill_group(pid)


if __name__ == "__main__":
    _run_guard()
