"""Log files over the attempts of a job: preservation of earlier logs, and a size limit.

    archive_logs(log_dir, tasks, attempt=1)            # job_0.log -> job_0.attempt1.log
    LogSizeLimit(2**28).cut(log_dir / "job_1.log")       # no-op below that size

A log above the limit keeps its beginning and its end. Workers append to their files, so a file can be
cut while a worker writes. Output that is written at that moment may be lost.
"""

import contextlib
import fcntl
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TextIO

from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.io import paths
from ctl.io.console import print_message
from ctl.launch.roles import log_name

KEPT_ATTEMPTS = 5
_LOCK_FILE = ".launcher"
_CHECK_SECS = 1.0
_RETRY_SECS = 1.0  # between two attempts to write to a full disk
_BEGIN_BYTES = 2**20
_END_BYTES = 8 * 2**20
_EARLIER_LOG = re.compile(r"(?:job|ps|evaluator)_[0-9]+\.attempt[0-9]+\.log", re.ASCII)


@contextlib.contextmanager
def log_dir_lock(log_dir: Path) -> Iterator[None]:
    """Locks the directory for the logs of this launcher. Raises UsageError if another launcher uses it.

    A file system without locks, such as an object store, is not locked.
    """
    if not paths.has_rename(log_dir):
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(_locked(log_dir))
            stack.callback(_unlink, log_dir / _LOCK_FILE)  # runs before the file is unlocked
            file.truncate(0)
            owner = f"ctl launch, process {os.getpid()} on {os.uname().nodename}\n"
            os.write(file.fileno(), owner.encode())  # a full buffer would raise again when it is closed
        yield


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _locked(log_dir: Path) -> TextIO:
    """Returns the locked lock file. Its last owner may delete it between `open` and `flock`."""
    while True:
        file = open(log_dir / _LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115  the caller closes it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(log_dir / _LOCK_FILE)):
                    return file
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise UsageError(
                f"{str(log_dir)!r} is in use: {owner} writes its logs there. Wait for its end, or specify "
                "another --model_dir or --log_dir"
            ) from None
        except OSError:
            file.close()
            raise
        file.close()


def earlier_log_name(task: Topology, attempt: int) -> str:
    """Returns the name of the log of an earlier attempt."""
    return log_name(task).replace(".log", f".attempt{attempt}.log")


def archive_logs(log_dir: Path, tasks: Iterable[Topology], attempt: int) -> None:
    """Renames the logs of an attempt that has ended, and deletes those of the attempt five before it."""
    delete_earlier_logs(log_dir, str(attempt - KEPT_ATTEMPTS))
    for task in tasks:
        with contextlib.suppress(OSError):
            os.replace(log_dir / log_name(task), log_dir / earlier_log_name(task, attempt))


def delete_earlier_logs(log_dir: Path, attempt: str = "*") -> None:
    """Deletes the logs of one attempt, by default those of all attempts of an earlier launcher."""
    with contextlib.suppress(OSError):
        for path in log_dir.glob(f"*.attempt{attempt}.log"):
            if _EARLIER_LOG.fullmatch(path.name):
                path.unlink(missing_ok=True)


class LogFile:
    """Log of one process that tolerates a full disk: output is dropped until space is available."""

    def __init__(self, path: Path, command: str, *, is_new: bool = True):
        """Opens the file if possible. With `is_new` an earlier file is deleted.

        Args:
          path: Path of the file.
          command: Name of the command in messages.
          is_new: If False, the file is continued.
        """
        self._path = path
        self._command = command
        self._file: IO[bytes] | None = None
        self._dropped_bytes = 0
        self._is_reported = False
        self._retry_secs = -math.inf
        if is_new and not path.is_symlink():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self.write(b"")

    def write(self, data: bytes) -> None:
        """Appends `data`. Counts the bytes that cannot be written, and reports the first such error."""
        if time.monotonic() < self._retry_secs:
            self._dropped_bytes += len(data)
            return
        note = f"\n{self._command}: {self._dropped_bytes} bytes were dropped here\n".encode()
        pending = (note if self._dropped_bytes else b"") + data
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (appending, so that it can be cut)
            while pending:
                pending = pending[self._file.write(pending) :]
                self._dropped_bytes = 0
        except OSError as e:
            self._dropped_bytes += min(len(pending), len(data))
            self._retry_secs = time.monotonic() + _RETRY_SECS
            self.close()
            if not self._is_reported:
                self._is_reported = True
                print_message(
                    f"{self._path} cannot be written ({e.strerror or e}); the job continues; output is "
                    "dropped until the file can be written again",
                    program=self._command,
                )

    def close(self) -> None:
        """Closes the file; a later write opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class LogSizeLimit:
    """Size limit of log files: `max_bytes`, 0 for no limit."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._cut: dict[Path, int] = {}
        self._checked_secs = 0.0

    def apply(self, paths: Iterable[Path]) -> None:
        """Cuts files above the limit, at most once a second."""
        now_secs = time.monotonic()
        if self._max_bytes and now_secs - self._checked_secs >= _CHECK_SECS:
            self._checked_secs = now_secs
            for path in paths:
                self.cut(path)

    def cut(self, path: Path) -> None:
        """Cuts a file if it is above the limit. A write error is ignored."""
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
                kept_parts = head[0] + head[1] or head[2], tail[2] or tail[0]
                self._cut[path] = self._cut.get(path, 0) + size - sum(map(len, kept_parts))
                note = f"\nctl launch: {self._cut[path]} bytes were cut here (--max_log_mib)\n"
                file.truncate(len(kept_parts[0]))  # the beginning is not moved, even if a worker writes
                with open(path, "ab", buffering=0) as log:
                    log.write(note.encode() + kept_parts[1])
