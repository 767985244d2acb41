"""TensorBoard's event files of one run, in a local directory or at a URL such as `gs://bucket/logs/train`."""

import contextlib
import errno
import itertools
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from ctl.io import paths
from ctl.metrics.publishing import Publishing
from tensorboard.compat import tf
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

_PREFIX = "events.out.tfevents."
_LOCAL_BLOCK_BYTES = 1 << 16
_REMOTE_BLOCK_BYTES = 1 << 24  # an object store uploads the complete file at each flush
_RECORD_BYTES = 16  # length and checksums of a record
_SPARE_BYTES = 1 << 14
_MAX_WAIT_SECS = 5.0
_log = logging.getLogger("ctl")
_file_numbers = itertools.count()


def import_file_system() -> None:
    """Imports TensorFlow, with its file systems, in the calling thread.

    A background thread that imports it while the process ends crashes the process.
    """
    _ = tf.io


class EventFolder:
    """Event files of one folder. The first flush after the construction or `close` starts a new file.

    - The caller's thread writes. TensorBoard's `EventFileWriter` would start another one, which Python 3.12
      does not permit while a program ends.
    - Events are pending until they are on disk. After an error they are written to another file. A local
      file must have the size of its events, as a file system can miss the error of the last write.
    - TensorBoard reads files in the order of their names, and reads no older file again. The name of a new
      file must sort last, also within a second. If another program has started a newer file, or has removed
      the file, a new file is started.

    Not safe for several threads. Its methods raise OSError if the disk fails. Added events are then
    pending, and the next `flush` writes them.

    Args:
      folder: Folder of the run. It is created if necessary.
      suffix: End of the file names.
    """

    def __init__(self, folder: paths.AnyPath, suffix: str = "") -> None:
        self._folder = folder
        self._suffix = suffix
        self._is_local = paths.has_rename(folder)
        self._block_bytes = _LOCAL_BLOCK_BYTES if isinstance(folder, Path) else _REMOTE_BLOCK_BYTES
        self._file: _EventFile | None = None
        self._newest_name = ""  # object stores list new files late
        self._written_bytes = 0  # of the open file
        self._pending: list[Any] = []
        self._pending_bytes = 0
        self._has_failed = False
        self._publishing = Publishing()

    def add(self, wall_time: float, step: int, **content: Any) -> None:
        """Appends one event. If the method raises an error, the event is not pending.

        Args:
          wall_time: Unix time (seconds).
          step: Number of completed steps.
          **content: `summary=`, `graph_def=` or `session_log=`.
        """
        if self._pending_bytes > self._block_bytes:
            self.flush()
        event = event_pb2.Event(wall_time=wall_time, step=step, **content)
        self._pending.append(event)
        self._pending_bytes += _num_bytes(event)

    def flush(self) -> None:
        """Writes all pending events, so that other processes can read them."""
        if not self._pending:
            return
        try:
            with paths.os_errors(self._folder):
                self._write_pending()
        except Exception:
            self._has_failed = True
            self._leave_file()
            raise
        self._has_failed = False

    def close(self) -> None:
        """Closes the current file. The next event starts another file."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            with paths.os_errors(self._folder):
                file.close()

    def discard(self) -> None:
        """Discards the pending events."""
        self._pending, self._pending_bytes = [], 0

    def files(self) -> list[paths.AnyPath]:
        """Returns the event files on disk, in the order in which TensorBoard reads them."""
        with contextlib.suppress(FileNotFoundError):
            listed: list[paths.AnyPath] = [*self._folder.iterdir()]
            files = [path for path in listed if path.name.startswith(_PREFIX)]
            return sorted(files, key=lambda path: path.name)
        return []

    def _write_pending(self) -> None:
        if self._file is not None and self._is_superseded(self._file.path):
            self._file.close()
            self._file = None
        if self._file is None:
            self._open()
        assert self._file is not None
        for event in self._pending:
            self._file.add(event)
        self._file.flush()
        if self._is_local:
            expected_bytes = self._written_bytes + self._pending_bytes
            size = _size(self._file.path)
            if size != expected_bytes:
                raise OSError(errno.EIO, f"{size} bytes after a write, expected {expected_bytes}")
        self._written_bytes += self._pending_bytes
        self.discard()
        self._publishing.after_flush(self._file.path)

    def _open(self) -> None:
        """Starts a file. Its name sorts after the names of all files in the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._has_failed:  # a file that cannot be written may be created all the same
            paths.probe(self._folder, self._pending_bytes + _SPARE_BYTES)
        newest_name = max([self._newest_name, *(path.name for path in self.files())])
        file = _EventFile(self._folder, self._suffix)
        deadline = time.monotonic() + _MAX_WAIT_SECS
        while file.path.name <= newest_name and time.monotonic() < deadline:
            file.close()
            file.path.unlink()
            time.sleep(1 - time.time() % 1)  # the name contains the Unix time (seconds)
            file = _EventFile(self._folder, self._suffix)
        if file.path.name <= newest_name:
            message = (
                "TensorBoard logs in %s: the clock of this machine is behind the time in the name of the "
                "newest file. TensorBoard may show the new values before the earlier ones."
            )
            _log.warning(message, self._folder)
        self._file, self._newest_name = file, max(newest_name, file.path.name)
        self._written_bytes = _size(file.path)

    def _leave_file(self) -> None:
        """Closes a file that cannot be written, and discards the pending events that it contains."""
        file, self._file = self._file, None
        if file is None:
            return
        with contextlib.suppress(Exception):
            file.close()
        num_bytes = _size(file.path) - self._written_bytes
        while self._pending and num_bytes >= (event_bytes := _num_bytes(self._pending[0])):
            del self._pending[0]
            num_bytes -= event_bytes
            self._pending_bytes -= event_bytes

    def _is_superseded(self, path: paths.AnyPath) -> bool:
        """Returns True if another process has removed the open file, or has started a newer one."""
        return not path.exists() or any(other.name > path.name for other in self.files())


class _EventFile:
    """A new event file, which begins with the version of its format.

    Args:
      folder: Existing folder of the file.
      suffix: End of its name.
    """

    def __init__(self, folder: paths.AnyPath, suffix: str) -> None:
        now_secs = time.time()
        number = f"{os.getpid()}.ctl{next(_file_numbers)}"  # TensorBoard's own writer has a number here
        self.path = folder / f"{_PREFIX}{int(now_secs):010d}.{socket.gethostname()}.{number}{suffix}"
        self._records = RecordWriter(tf.io.gfile.GFile(str(self.path), "wb"))
        self.add(event_pb2.Event(wall_time=now_secs, file_version="brain.Event:2"))
        self.flush()

    def add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()


def _num_bytes(event: Any) -> int:
    return event.ByteSize() + _RECORD_BYTES


def _size(path: paths.AnyPath) -> int:
    """Returns the size of a file (bytes), or 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
