"""Detection of out-of-memory kills by the kernel, with the peak memory of the process.

    memory = Memory(pid)
    memory.read()              # regularly, while it runs
    memory.describe_out_of_memory()     # after a SIGKILL: "... out of memory ..." or ""

Linux counts such kills per control group (versions 1 and 2) and per machine.
"""

import contextlib
import math
import re
import time
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED_BYTES = 1 << 60
_MACHINE = Path("/proc/vmstat")  # used if no control group is readable
_EXIT_SECS = 10.0  # a process ends within this time after the kernel has killed its child


class Memory:
    """The memory use of one process, as of the newest `read`.

    Attributes:
      peak_bytes: Peak of the resident memory, 0 if unknown.
    """

    def __init__(self, pid: int):
        self.peak_bytes = 0
        self._pid = pid
        self._kills: dict[Path, int] = {}  # counter -> value at the newest read
        self._newest_kill_secs = -math.inf  # time of the read that found it
        self._limit_bytes = _UNLIMITED_BYTES

    def read(self) -> None:
        """Reads the peak, and the counters of the current control group, which a process may change."""
        if self._has_new_kill():
            self._newest_kill_secs = time.monotonic()
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{self._pid}/status").read_text(errors="replace")
            if match := re.search(r"VmHWM:\s+(\d+) kB", status):
                self.peak_bytes = max(self.peak_bytes, int(match[1]) * 1024)
            for group in _control_groups(self._pid):
                self._limit_bytes = min(self._limit_bytes, _limit(group))
                for file_name in ("memory.events", "memory.oom_control"):
                    if (group / file_name).exists():
                        self._kills[group / file_name] = _kill_count(group / file_name)
        if not self._kills or _MACHINE in self._kills:
            self._kills[_MACHINE] = _kill_count(_MACHINE)

    def describe_out_of_memory(self) -> str:
        """Returns the end of a sentence if a counter has grown in the last 10 s, else "".

        The kernel may have killed a child, such as the program of a shell, some time before the end.
        """
        is_recent = time.monotonic() - self._newest_kill_secs < _EXIT_SECS
        if not is_recent and not self._has_new_kill():
            return ""
        limit = "the machine's memory"
        if self._limit_bytes < _UNLIMITED_BYTES:
            limit = f"a limit of {_format_bytes(self._limit_bytes)}"
        return f"was killed by the kernel, out of memory (peak {_format_bytes(self.peak_bytes)}, {limit})"

    def _has_new_kill(self) -> bool:
        return any(_kill_count(path) > before for path, before in self._kills.items())

    @property
    def peak(self) -> str:
        """Peak of the resident memory with its unit, or "unknown"."""
        return _format_bytes(self.peak_bytes) if self.peak_bytes else "unknown"


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _control_groups(pid: int) -> list[Path]:
    """Returns the memory control group of a process and its parents."""
    groups = []
    for line in Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines():
        _, controllers, relative_path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        group = root / relative_path.lstrip("/")
        groups += [g for g in (group, *group.parents) if g == root or root in g.parents]
    return groups


def _limit(group: Path) -> int:
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            return int((group / name).read_text())
    return _UNLIMITED_BYTES


def _kill_count(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0
