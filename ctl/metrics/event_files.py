"""TensorBoard's event files of one run, without TensorFlow: append, read, rewrite.

A file is a row of records: 8 bytes of length, their checksum, the data, its checksum. A process
killed while writing leaves half a record at the end; readers stop there, and so do we.
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
_AGAIN = ".again"  # in an object store, where no file can be renamed over another
_TEMPORARY = "rewrite.tmp"  # TensorBoard opens whatever has "tfevents" in its name; not this


class EventFolder:
    """The event files in `folder`; a new one is begun at the first event after opening.

    Not safe for several threads. Raises OSError when the disk refuses; what was added stays, and the
    next `flush` goes on where the disk stopped.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock  # Unix seconds
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._pending = bytearray()  # records, and what is left of one that was written in part
        self._torn = False  # whether such a rest comes first
        self._seconds = 0  # in the name of the newest file, which may not be listed yet
        self._publishing = Publishing()

    def add(self, wall_time: float, step: int, **what: Any) -> None:
        """Appends one event; `what` is `summary=`, `graph_def=` or `session_log=`."""
        if self._file is None or self._replaced():
            self._begin_file()
        if len(self._pending) > _BLOCK_BYTES:  # before it is longer: what raises has added nothing
            self.flush()
        self._append(event_pb2.Event(wall_time=wall_time, step=step, **what))

    def flush(self) -> None:
        """Hands everything to the operating system, so that other processes see it."""
        if self._file is None or self._path is None:
            return
        while self._pending:
            written = self._file.write(self._pending) or 0
            del self._pending[:written]
            self._torn = bool(self._pending)
        self._publishing.flushed(self._file, self._path)

    def close(self) -> None:
        """Ends the current file; the next event begins another."""
        self.flush()
        file, self._file, self._path = self._file, None, None
        if file is not None:
            file.close()

    def paths(self) -> list[Path]:
        """Event files on disk in the order TensorBoard reads them."""
        return sorted(path for path in self._folder.glob(f"{_PREFIX}*") if path.is_file())

    def keep_only(self, wanted: Callable[[Any], bool]) -> None:
        """Rewrites, atomically, each closed file that holds an event not wanted or half a record.

        A file of which nothing remains is removed. A program that has such a file open for
        writing goes on in a new one.
        """
        for path in self.paths():
            if path != self._path:
                _rewrite(path, wanted)

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._pending += record.getvalue()

    def _replaced(self) -> bool:
        """True if somebody removed or rewrote our file: what we write would be lost."""
        assert self._file is not None and self._path is not None
        try:
            return os.stat(self._path).st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return True

    def _begin_file(self) -> None:
        if self._file is not None:  # it was removed, and what is not written goes to the new one
            self._file.close()
            self._file = None
            if self._torn:
                self._pending.clear()
                self._torn = False
        self._folder.mkdir(parents=True, exist_ok=True)
        now = self._clock()
        # TensorBoard reads files by name and takes a step back for a restart that undoes what
        # came before, so ours must sort last, also within the second and after a clock was set.
        begun = [self._seconds, *(_begun_secs(path) for path in self.paths())]
        self._seconds = seconds = max(int(now), *(secs + 1 for secs in begun))
        self._path = self._folder / f"{_PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115
        left = bytes(self._pending)
        self._pending.clear()
        self._append(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        self._pending += left


def read_records(path: Path) -> Iterator[bytes]:
    """The data of every whole record, up to the end or the first damaged one."""
    with open(path, "rb") as file:
        while True:
            header = file.read(12)
            if len(header) < 12 or not _intact(header[:8], header[8:]):
                return
            (length,) = struct.unpack("<Q", header[:8])
            data, checksum = file.read(length), file.read(4)
            if len(data) < length or len(checksum) < 4 or not _intact(data, checksum):
                return
            yield data


def _rewrite(path: Path, wanted: Callable[[Any], bool]) -> None:
    kept = bytes_kept = 0
    renamed = paths.has_rename(path)
    temporary = path.with_name(_TEMPORARY) if renamed else _next_name(path)
    with open(temporary, "wb") as file:
        writer = RecordWriter(file)
        for data in read_records(path):
            try:
                event = event_pb2.Event.FromString(data)
            except DecodeError:
                break
            is_version = event.WhichOneof("what") == "file_version"
            if is_version or wanted(event):
                writer.write(data)
                kept += not is_version
        file.flush()
        os.fsync(file.fileno())
        bytes_kept = file.tell()
    if not kept:
        temporary.unlink()
        path.unlink()
    elif bytes_kept != path.stat().st_size:
        os.replace(temporary, path) if renamed else path.unlink()
    else:
        temporary.unlink()


def _next_name(path: Path) -> Path:
    """Of the file that takes the place of `path`; it sorts next to it."""
    name, _, count = path.name.partition(_AGAIN)
    return path.with_name(f"{name}{_AGAIN}{int(count or 0) + 1}")


def _intact(data: bytes, checksum: bytes) -> bool:
    return struct.unpack("<I", checksum)[0] == masked_crc32c(data)


def _begun_secs(path: Path) -> int:
    digits = path.name.removeprefix(_PREFIX).partition(".")[0]
    return int(digits) if digits.isdigit() else 0
