"""TensorBoard's event files of one run, without TensorFlow: append, read, rewrite.

A file is a sequence of records: 8 bytes of length, their checksum, the data, its checksum. A process that
is killed during a write leaves an incomplete record at the end, at which readers stop.
"""

import io
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ctl.io import paths
from ctl.metrics.publishing import Publishing
from google.protobuf.message import DecodeError
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

_PREFIX = "events.out.tfevents."
_BLOCK_BYTES = 1 << 13
_REWRITTEN = ".again"  # suffix in object stores, which cannot replace a file by a rename
_TEMPORARY = "rewrite.tmp"  # TensorBoard opens every file with "tfevents" in its name


class EventFolder:
    """Event files of one folder. The first event after the construction or `close` starts a new file.

    Not safe for several threads. Its methods raise OSError if the disk fails. Added events are then
    pending, and the next `flush` continues at the byte where the write has failed.

    Args:
      folder: Folder of the run. It is created if necessary.
      clock: Function that returns the Unix time (seconds).
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._pending = bytearray()  # records, the first possibly without its written bytes
        self._is_torn = False  # True if the first pending record has been written in part
        self._seconds = 0  # in the name of the newest file, which the folder may not list yet
        self._publishing = Publishing()

    def add(self, wall_time: float, step: int, **content: Any) -> None:
        """Appends one event.

        Args:
          wall_time: Unix time (seconds).
          step: Number of completed steps.
          **content: `summary=`, `graph_def=` or `session_log=`.
        """
        if self._file is None or self._is_replaced():
            self._begin_file()
        if len(self._pending) > _BLOCK_BYTES:  # first, so that a call that raises has added no event
            self.flush()
        self._append(event_pb2.Event(wall_time=wall_time, step=step, **content))

    def flush(self) -> None:
        """Writes all pending records, so that other processes can read them."""
        if self._file is None or self._path is None:
            return
        while self._pending:
            written = self._file.write(self._pending) or 0
            del self._pending[:written]
            self._is_torn = bool(self._pending)
        self._publishing.after_flush(self._file, self._path)

    def close(self) -> None:
        """Closes the current file. The next event starts another file."""
        self.flush()
        file, self._file, self._path = self._file, None, None
        if file is not None:
            file.close()

    def paths(self) -> list[Path]:
        """Returns the event files on disk, in the order in which TensorBoard reads them."""
        return sorted(path for path in self._folder.glob(f"{_PREFIX}*") if path.is_file())

    def keep_only(self, should_keep: Callable[[Any], bool]) -> None:
        """Removes events from the closed files, and incomplete records.

        Each changed file is replaced atomically, or removed if no event remains. A program that has such a
        file open for writing continues in a new file.

        Args:
          should_keep: Function of an event that returns True if the event stays.
        """
        for path in self.paths():
            if path != self._path:
                _rewrite(path, should_keep)

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._pending += record.getvalue()

    def _is_replaced(self) -> bool:
        """Returns True if another process has removed or replaced the open file."""
        assert self._file is not None and self._path is not None
        try:
            return os.stat(self._path).st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return True

    def _begin_file(self) -> None:
        if self._file is not None:  # removed by another process; the new file gets the pending records
            self._file.close()
            self._file = None
            if self._is_torn:
                self._pending.clear()
                self._is_torn = False
        self._folder.mkdir(parents=True, exist_ok=True)
        start_time = self._clock()
        # TensorBoard reads files in the order of their names, and a step that is lower than the step before
        # is a restart. The new name must sort last, also within a second and after a change of the clock.
        used_seconds = [self._seconds, *(_seconds_in_name(path) for path in self.paths())]
        self._seconds = seconds = max(int(start_time), *(used + 1 for used in used_seconds))
        self._path = self._folder / f"{_PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115
        records = bytes(self._pending)
        self._pending.clear()
        self._append(event_pb2.Event(wall_time=start_time, file_version="brain.Event:2"))
        self._pending += records


def read_records(path: Path) -> Iterator[bytes]:
    """Yields the data of each record, until the end or the first damaged record."""
    with open(path, "rb") as file:
        while True:
            header = file.read(12)
            if len(header) < 12 or not _is_intact(header[:8], header[8:]):
                return
            (length,) = struct.unpack("<Q", header[:8])
            data, checksum = file.read(length), file.read(4)
            if len(data) < length or len(checksum) < 4 or not _is_intact(data, checksum):
                return
            yield data


def _rewrite(path: Path, should_keep: Callable[[Any], bool]) -> None:
    num_events = 0
    can_rename = paths.has_rename(path)
    temporary = path.with_name(_TEMPORARY) if can_rename else _next_name(path)
    with open(temporary, "wb") as file:
        writer = RecordWriter(file)
        for data in read_records(path):
            try:
                event = event_pb2.Event.FromString(data)
            except DecodeError:
                break
            is_version = event.WhichOneof("what") == "file_version"
            if is_version or should_keep(event):
                writer.write(data)
                num_events += not is_version
        file.flush()
        os.fsync(file.fileno())
        num_bytes = file.tell()
    if not num_events:
        temporary.unlink()
        path.unlink()
    elif num_bytes != path.stat().st_size:
        os.replace(temporary, path) if can_rename else path.unlink()
    else:
        temporary.unlink()


def _next_name(path: Path) -> Path:
    """Returns the name of the file that replaces `path` and sorts next to it."""
    name, _, count = path.name.partition(_REWRITTEN)
    return path.with_name(f"{name}{_REWRITTEN}{int(count or 0) + 1}")


def _is_intact(data: bytes, checksum: bytes) -> bool:
    return struct.unpack("<I", checksum)[0] == masked_crc32c(data)


def _seconds_in_name(path: Path) -> int:
    digits = path.name.removeprefix(_PREFIX).partition(".")[0]
    return int(digits) if digits.isdigit() else 0
