"""What the ranks write, line by line on our own stdout and stderr, each line with its rank in front.

    output = Output(directory=None, with_time=False, count=2)
    out, err = output.writers(0)         # file descriptors for the process
    ...
    output.given(0)                      # it has them; closes ours
    output.start()
    output.finish()

    [0]<stdout>:epoch 1
    [1]<stderr>:ValueError: no data

A line ends with \\n, or with \\r as progress bars have it. A console that goes away, or a disk that is
full, ends that copy only.
"""

import contextlib
import os
import re
import select
import sys
import threading
import time
from pathlib import Path
from typing import IO

from ctl.errors import UsageError

_READ_BYTES = 65536
_WAKE_SECS = 0.1
_DRAIN_SECS = 1.0  # for what is under way when all have ended
_CONSOLE_SECS = 10.0  # for a console that takes it slowly, such as a pager
_LINE_BYTES = 65536  # a longer line goes on in pieces
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])|[^\r\n]+")


class _Stream:
    """One of the two streams of one process."""

    def __init__(self, number: int, kind: str, file: IO[bytes] | None):
        self.number = number
        self.kind = kind
        self.file = file
        self.rest = b""  # the beginning of a line
        self.last = b""  # the newest line with anything in it

    def feed(self, data: bytes, is_last: bool = False) -> list[bytes]:
        """The lines that are complete by now."""
        lines = _LINE.findall(self.rest + data)
        self.rest = b""
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            if is_last:
                lines[-1] += b"\n"
            elif len(lines[-1]) < _LINE_BYTES:
                self.rest = lines.pop()
        self.last = next((s for line in reversed(lines) if (s := line.strip())), self.last)
        return lines


class Output:
    """Copies the output of all processes in a thread, until `finish`."""

    def __init__(self, *, directory: str | None = None, with_time: bool = False, count: int = 1):
        """Keeps.

        Args:
          directory: for files as well; count: of processes, for equally long names there.
        """
        self._directory = Path(directory) if directory else None
        self._with_time = with_time
        self._digits = len(str(max(count - 1, 0)))
        self._streams: dict[int, _Stream] = {}  # by the descriptor that is read
        self._by_number: dict[tuple[int, str], _Stream] = {}
        self._writers: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._dead: set[str] = set()  # consoles that went away
        self._finish_by_secs: float | None = None
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)

    def writers(self, number: int) -> tuple[int, int]:
        """Two descriptors for stdout and stderr of a process; UsageError for a disk that refuses."""
        writers = []
        for kind in ("stdout", "stderr"):
            stream = _Stream(number, kind, self._file(number, kind))
            reader, writer = os.pipe()
            writers.append(writer)
            with self._lock:
                self._streams[reader] = self._by_number[number, kind] = stream
        self._writers[number] = tuple(writers)
        return writers[0], writers[1]

    def given(self, number: int) -> None:
        """The process has its descriptors by now."""
        for writer in self._writers.pop(number, ()):
            os.close(writer)

    def start(self) -> None:
        """Begins to copy; better after the first forks than before."""
        self._thread.start()

    def finish(self) -> None:
        """Copies what is still under way, for ten seconds at most."""
        for number in list(self._writers):
            self.given(number)
        self._finish_by_secs = time.monotonic() + _DRAIN_SECS
        if self._thread.ident:
            self._thread.join(_CONSOLE_SECS)

    def last_error(self, number: int) -> str:
        """The newest line that a process wrote to its stderr."""
        stream = self._by_number.get((number, "stderr"))
        return stream.last.decode(errors="replace") if stream else ""

    def _file(self, number: int, kind: str) -> IO[bytes] | None:
        if self._directory is None:
            return None
        path = self._directory / f"rank.{number:0{self._digits}d}" / kind
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "wb", buffering=0)
        except OSError as e:
            raise UsageError(
                f"--output-filename: {path} cannot be written ({e.strerror}); give a directory that can"
            ) from None

    def _copy(self) -> None:
        while True:
            with self._lock:
                readers = list(self._streams)
            late = self._finish_by_secs is not None and time.monotonic() > self._finish_by_secs
            if self._finish_by_secs is not None and (late or not readers):
                break
            ready = _ready(readers)
            for reader in ready:
                self._read(reader)
        for reader in list(self._streams):
            self._close(reader)

    def _read(self, reader: int) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(reader, _READ_BYTES)
        if data:
            self._write(self._streams[reader], self._streams[reader].feed(data))
        else:
            self._close(reader)

    def _close(self, reader: int) -> None:
        with self._lock:
            stream = self._streams.pop(reader)
        self._write(stream, stream.feed(b"", is_last=True))
        os.close(reader)
        if stream.file:
            stream.file.close()

    def _write(self, stream: _Stream, lines: list[bytes]) -> None:
        if stream.file:
            with contextlib.suppress(OSError):
                stream.file.write(b"".join(lines))
        now = time.asctime() if self._with_time else ""
        front = f"{now}[{stream.number}]<{stream.kind}>:".encode()
        self._to_console(stream.kind, b"".join(front + line for line in lines))

    def _to_console(self, kind: str, data: bytes) -> None:
        console = getattr(sys, kind)
        if not data or kind in self._dead or console is None:
            return
        try:
            if hasattr(console, "buffer"):
                console.buffer.write(data)
            else:  # a notebook's
                console.write(data.decode(errors="replace"))
            console.flush()
        except (OSError, ValueError):
            self._dead.add(kind)


def _ready(readers: list[int]) -> list[int]:
    """Those that can be read, after a short while at most; `select` has no room for many."""
    if not readers:
        time.sleep(_WAKE_SECS)
        return []
    poll = select.poll()
    for reader in readers:
        poll.register(reader, select.POLLIN)
    return [reader for reader, _ in poll.poll(_WAKE_SECS * 1000)]
