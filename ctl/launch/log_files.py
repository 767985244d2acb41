"""Log files over the attempts of a job: earlier ones are kept, and none grows without limit.

    set_aside_logs(log_dir, tasks, attempt=1)            # job_0.log -> job_0.attempt1.log
    LogSizeLimit(2**28).cut(log_dir / "job_1.log")       # does nothing below that size

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
from typing import TextIO

from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.io import paths
from ctl.launch.roles import log_name

KEPT_ATTEMPTS = 5
_LOCK_FILE = ".launcher"
_CHECK_SECS = 1.0
_BEGIN_BYTES = 2**20
_END_BYTES = 8 * 2**20
_EARLIER_LOG = re.compile(r"(?:job|ps|evaluator)_[0-9]+\.attempt[0-9]+\.log", re.ASCII)


@contextlib.contextmanager
def log_dir_lock(log_dir: Path) -> Iterator[None]:
    """Within the block no other launcher writes logs here; UsageError while another one does.

    A file system without locks, such as an object store, is not locked.
    """
    if not paths.has_rename(log_dir):
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(_locked(log_dir))
            file.truncate(0)
            file.write(f"ctl launch, process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
            stack.callback((log_dir / _LOCK_FILE).unlink, missing_ok=True)  # before it is unlocked
        yield


def _locked(log_dir: Path) -> TextIO:
    """The lock file, locked; its last owner may delete it between our opening and our locking it."""
    while True:
        file = open(log_dir / _LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115  the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(log_dir / _LOCK_FILE)):
                    return file
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "another process"
            file.close()
            raise UsageError(
                f"{str(log_dir)!r} is in use: {who} writes its logs there. Wait for its end, or give "
                "another --model_dir or --log_dir"
            ) from None
        except OSError:
            file.close()
            raise
        file.close()


def earlier_log_name(task: Topology, attempt: int) -> str:
    """The name of the log of an earlier attempt."""
    return log_name(task).replace(".log", f".attempt{attempt}.log")


def set_aside_logs(log_dir: Path, tasks: Iterable[Topology], attempt: int) -> None:
    """Keeps the logs of an attempt that has ended, and deletes those of the sixth before the next."""
    delete_earlier_logs(log_dir, str(attempt - KEPT_ATTEMPTS))
    for task in tasks:
        with contextlib.suppress(OSError):
            os.replace(log_dir / log_name(task), log_dir / earlier_log_name(task, attempt))


def delete_earlier_logs(log_dir: Path, attempt: str = "*") -> None:
    """Deletes the logs of an earlier attempt, or of all that an earlier start of the launcher kept."""
    with contextlib.suppress(OSError):
        for path in log_dir.glob(f"*.attempt{attempt}.log"):
            if _EARLIER_LOG.fullmatch(path.name):
                path.unlink(missing_ok=True)


class LogSizeLimit:
    """Keeps log files below `max_bytes`; 0 is without limit."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._cut: dict[Path, int] = {}
        self._checked_secs = 0.0

    def apply(self, paths: Iterable[Path]) -> None:
        """Cuts what is too long, once a second at most."""
        now = time.monotonic()
        if self._max_bytes and now - self._checked_secs >= _CHECK_SECS:
            self._checked_secs = now
            for path in paths:
                self.cut(path)

    def cut(self, path: Path) -> None:
        """Cuts one file if it is too long; a write error is ignored."""
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            if not self._max_bytes or size <= self._max_bytes:
                return
            head_bytes = min(_BEGIN_BYTES, self._max_bytes // 4)
            tail_bytes = min(_END_BYTES, self._max_bytes // 4)
            with open(path, "r+b", buffering=0) as file:
                head = file.read(head_bytes).rpartition(b"\n")
                file.seek(-tail_bytes, os.SEEK_END)
                tail = file.read(tail_bytes).partition(b"\n")
                kept = head[0] + head[1] or head[2], tail[2] or tail[0]
                self._cut[path] = self._cut.get(path, 0) + size - sum(map(len, kept))
                note = f"\nctl launch: {self._cut[path]} bytes were cut here (--max_log_mib)\n"
                file.truncate(len(kept[0]))  # the beginning stays in place, whatever a worker writes
                with open(path, "ab", buffering=0) as end:
                    end.write(note.encode() + kept[1])
