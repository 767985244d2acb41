"""The log files of a job over its attempts: earlier ones are kept, and none grows without end.

    set_aside(log_dir, tasks, attempt=1)       # job_0.log -> job_0.attempt1.log
    bounds = Bounds(most_bytes=256 * 2**20)
    bounds.cut(log_dir / "job_1.log")          # does nothing below that size

A log that is too long keeps its beginning and its end. Workers append to their files, so a file can be
cut while one writes; what it writes in that very moment may be lost.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ctl.distribute.cluster import Cluster
from ctl.errors import UsageError
from ctl.io import paths
from ctl.launch.roles import log_name

KEPT_ATTEMPTS = 5
_OWNER = ".launcher"
_LOOK_SECS = 1.0
_HEAD_BYTES = 2**20
_TAIL_BYTES = 8 * 2**20
_EARLIER = re.compile(r"(?:job|ps|evaluator)_[0-9]+\.attempt[0-9]+\.log", re.ASCII)


@contextlib.contextmanager
def owned(log_dir: Path) -> Iterator[None]:
    """Within the block no other launcher writes logs here; UsageError while another one does.

    A file system without locks, such as an object store, is taken as it is.
    """
    if not paths.has_rename(log_dir):
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(log_dir / _OWNER, "a+", encoding="utf-8"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                who = file.read().strip() or "another process"
                raise UsageError(
                    f"{str(log_dir)!r} is in use: {who} writes its logs there. Wait for its end, or give "
                    "another --model_dir or --log_dir"
                ) from None
            file.truncate(0)
            file.write(f"ctl launch, process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
            stack.callback((log_dir / _OWNER).unlink, missing_ok=True)  # before it is unlocked
        yield


def earlier_name(task: Cluster, attempt: int) -> str:
    """What the log of an earlier attempt is called."""
    return log_name(task).replace(".log", f".attempt{attempt}.log")


def set_aside(log_dir: Path, tasks: Iterable[Cluster], attempt: int) -> None:
    """Keeps the logs of an attempt that has ended, and deletes those of the sixth before the next."""
    with contextlib.suppress(OSError):
        for path in log_dir.glob(f"*.attempt{attempt - KEPT_ATTEMPTS}.log"):
            if _EARLIER.fullmatch(path.name):
                path.unlink(missing_ok=True)
    for task in tasks:
        with contextlib.suppress(OSError):
            os.replace(log_dir / log_name(task), log_dir / earlier_name(task, attempt))


def forget_earlier(log_dir: Path) -> None:
    """Deletes the earlier attempts of an earlier start."""
    with contextlib.suppress(OSError):
        for path in log_dir.glob("*.attempt*.log"):
            if _EARLIER.fullmatch(path.name):
                path.unlink(missing_ok=True)


class Bounds:
    """Keeps log files below a size, in bytes; 0 is without bound."""

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._cut: dict[Path, int] = {}
        self._looked_secs = 0.0

    def look(self, paths: Iterable[Path]) -> None:
        """Cuts what is too long, once a second at most."""
        now = time.monotonic()
        if self._most_bytes and now - self._looked_secs >= _LOOK_SECS:
            self._looked_secs = now
            for path in paths:
                self.cut(path)

    def cut(self, path: Path) -> None:
        """Cuts one file if it is too long; a disk that refuses is borne."""
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if not self._most_bytes or size <= self._most_bytes:
                return
            head_bytes = min(_HEAD_BYTES, self._most_bytes // 4)
            tail_bytes = min(_TAIL_BYTES, self._most_bytes // 4)
            with open(path, "r+b", buffering=0) as file:
                head = file.read(head_bytes).rpartition(b"\n")
                file.seek(-tail_bytes, os.SEEK_END)
                tail = file.read(tail_bytes).partition(b"\n")
                kept = head[0] + head[1] or head[2], tail[2] or tail[0]
                self._cut[path] = self._cut.get(path, 0) + size - sum(map(len, kept))
                note = f"\nctl launch: {self._cut[path]} bytes were cut here (--max_log_mib)\n"
                with open(path, "ab", buffering=0) as end:  # after what a worker writes meanwhile
                    file.truncate(0)
                    end.write(kept[0] + note.encode() + kept[1])
