"""Output of the processes of a job: copied to files and to the console, in one thread.

    output = LogOutput(log_dir, tasks, max_bytes=2**28)     # ctl launch: a log for each, the chief's shown
    output = RankOutput(directory=None, count=2)            # ctlrun: each line with its rank in front
    out, err = output.writers(task)                         # file descriptors for the process

A console that goes away (`| head`) or a disk that is full ends that copy only, never the process.
"""

import contextlib
import fcntl
import os
import re
import select
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.io import disk_errors
from ctl.io.console import set_printer
from ctl.launch.log_files import LogFile, LogSizeLimit
from ctl.launch.roles import log_name
from ctl.launch.terminal_text import TerminalText

_STDOUT = 1  # file descriptor of the launcher's stdout
_READ_BYTES = 65536
_WAKE_SECS = 0.1  # until `finish`, new streams and a new window size are noticed
_BAR_SECS = 1.0  # for output under way, before a message of the launcher
_DRAIN_SECS = 1.0  # for output under way when all processes have ended
_FINISH_SECS = 10.0  # for a slow console, such as a pager
_MAX_LINE_BYTES = 65536  # a longer line goes on in pieces
_ESCAPE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_REDRAW = re.compile(rb"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])|[^\r\n]+")


class _Stream:
    """Copies one stream of a process to a file and to our own stream of this kind."""

    def __init__(self, kind: str, file: LogFile | None):
        self._kind = kind
        self._file = file
        self._has_console = True
        self.has_ended = threading.Event()  # all of it has been copied

    def feed(self, data: bytes, is_last: bool = False) -> None:
        """Copies what was read."""
        raise NotImplementedError

    def wake(self) -> None:
        """Called every 0.1 s at least."""

    def close(self) -> None:
        """Copies what is left."""
        self.feed(b"", is_last=True)
        if self._file:
            self._file.close()
        self.has_ended.set()

    def _to_file(self, data: bytes) -> None:
        if self._file and data:
            self._file.write(data)

    def _to_console(self, data: bytes) -> None:
        console = getattr(sys, self._kind)
        while self._has_console and data and console is not None:
            try:
                console.flush()
                descriptor = _descriptor(console)
                if descriptor is None:
                    console.write(data.decode(errors="replace"))
                    console.flush()
                    return
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                _ready([console.fileno()], select.POLLOUT)
            except (OSError, ValueError):
                self._has_console = False


class Output:
    """Copies streams in a thread, until `finish`; subclasses say which streams a process has."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}  # by the descriptor that is read
        self._writers: dict[str, list[int]] = {}  # by the name of the log
        self._stream_ends: dict[str, list[threading.Event]] = {}  # by the name of the log
        self._lock = threading.Lock()
        self._finish_by_secs: float | None = None
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)

    def writers(self, task: Topology) -> tuple[int, int]:
        """File descriptors for the stdout and the stderr of a process."""
        raise NotImplementedError

    def limit_logs(self, tasks: Iterable[Topology]) -> None:
        """Keeps the logs of running processes below their size."""

    def note(self, task: Topology, text: str) -> None:
        """Adds a line to the log of a process, if it has one."""

    def close_writers(self, task: Topology) -> None:
        """The process has its descriptors by now, or will not be started."""
        for writer in self._writers.pop(log_name(task), ()):
            os.close(writer)

    def start(self) -> None:
        """Begins to copy; better after the first forks than before: threads and forks do not mix."""
        self._thread.start()

    def drain(self, task: Topology) -> None:
        """Waits until the output of a process that has ended is copied, for one second at most."""
        until_secs = time.monotonic() + _DRAIN_SECS  # a process in another session may hold the pipe
        for has_ended in self._stream_ends.pop(log_name(task), ()) if self._thread.is_alive() else ():
            has_ended.wait(max(0.0, until_secs - time.monotonic()))

    def finish(self) -> None:
        """Copies what is under way, for ten seconds at most."""
        for writers in self._writers.values():
            for writer in writers:
                os.close(writer)
        self._writers.clear()
        self._finish_by_secs = time.monotonic() + _DRAIN_SECS
        if self._thread.ident:
            self._thread.join(_FINISH_SECS)

    def _add(self, task: Topology, reader: int, writer: int, stream: _Stream) -> None:
        with self._lock:
            self._streams[reader] = stream
        self._writers.setdefault(log_name(task), []).append(writer)
        self._stream_ends.setdefault(log_name(task), []).append(stream.has_ended)

    def _copy(self) -> None:
        while True:
            with self._lock:
                streams = dict(self._streams)
            ready = _ready(streams)
            for reader in ready:
                self._read(reader)
            for stream in streams.values():
                stream.wake()
            until_secs = self._finish_by_secs
            if until_secs and not ready and (not streams or time.monotonic() >= until_secs):
                break  # a process that left its group may hold a writer
        for reader in list(self._streams):
            self._close(reader)

    def _read(self, reader: int) -> None:
        data = b""
        with contextlib.suppress(OSError):  # how Linux says that a terminal has no writer left
            data = os.read(reader, _READ_BYTES)
        if data:
            self._streams[reader].feed(data)
        else:
            self._close(reader)

    def _close(self, reader: int) -> None:
        with self._lock:
            stream = self._streams.pop(reader)
        stream.close()
        os.close(reader)


class LogOutput(Output):
    """A log per process; the first one's output is on the console as well, byte for byte.

    On a terminal that process gets a terminal of its own, so that a live progress bar works. Its log
    keeps the text only.
    """

    def __init__(self, log_dir: Path, tasks: Sequence[Topology], max_bytes: int = 0):
        """`max_bytes` is of one log; 0 is without limit."""
        super().__init__()
        self._log_dir = log_dir
        self._shown = tasks[0]
        self._limit = LogSizeLimit(max_bytes)
        self._opened: set[str] = set()
        self._bar: _ShownStream | None = None

    def writers(self, task: Topology) -> tuple[int, int]:
        """An earlier log is overwritten, but continued when the process is started again."""
        file = LogFile(self.path(task), "ctl launch", is_new=log_name(task) not in self._opened)
        self._opened.add(log_name(task))
        if task == self._shown:
            self._bar = shown = _ShownStream(file)
            writer = shown.writer
            self._add(task, shown.reader, writer, shown)
        else:
            reader, writer = os.pipe()
            self._add(task, reader, writer, _FileStream(file))
        return writer, writer

    def start(self) -> None:
        """Starts to copy; messages of the launcher go above a live progress bar."""
        super().start()
        if self._bar is not None:
            set_printer(self._bar.print_above)

    def finish(self) -> None:
        super().finish()
        set_printer(None)

    def path(self, task: Topology) -> Path:
        """The log of a process."""
        return self._log_dir / log_name(task)

    def note(self, task: Topology, text: str) -> None:
        """Adds a line; a write error is ignored."""
        with contextlib.suppress(OSError), open(self.path(task), "ab") as file:
            file.write(f"ctl launch: {text}\n".encode())

    def limit_logs(self, tasks: Iterable[Topology]) -> None:
        self._limit.apply(map(self.path, tasks))


class RankOutput(Output):
    """Lines of all ranks on our own stdout and stderr, and in files if there is a directory for them.

    A line ends with \\n, or with \\r as progress bars have it.
    """

    def __init__(self, *, directory: str | None = None, with_time: bool = False, count: int = 1):
        """`count` of processes gives the names of directories equal lengths."""
        super().__init__()
        self._directory = Path(directory) if directory else None
        self._with_time = with_time
        self._digits = len(str(max(count - 1, 0)))
        self._errors: dict[int, _LineStream] = {}

    def writers(self, task: Topology) -> tuple[int, int]:
        """Two pipes; UsageError when a file cannot be written."""
        pair = []
        for kind in ("stdout", "stderr"):
            stream = _LineStream(kind, self._file(task, kind), task.task_index, self._with_time)
            reader, writer = os.pipe()
            self._add(task, reader, writer, stream)
            pair.append(writer)
        self._errors[task.task_index] = stream
        return pair[0], pair[1]

    def last_error(self, task: Topology) -> str:
        """The last line that a process that has ended wrote to its stderr; waits until it is here."""
        stream = self._errors.get(task.task_index)
        if stream is None:
            return ""
        stream.has_ended.wait(_DRAIN_SECS)  # not for ever: a process of its own may hold the pipe
        return stream.last.decode(errors="replace")

    def _file(self, task: Topology, kind: str) -> LogFile | None:
        if self._directory is None:
            return None
        path = self._directory / f"rank.{task.task_index:0{self._digits}d}" / kind
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("wb").close()
        except OSError as e:
            if disk_errors.is_transient(e):
                return LogFile(path, "ctlrun")
            raise UsageError(
                f"--output-filename: {path} cannot be written ({e.strerror}); give a directory that can"
            ) from None
        return LogFile(path, "ctlrun", is_new=False)


class _LineStream(_Stream):
    """Copies whole lines; on the console with the rank in front."""

    def __init__(self, kind: str, file: LogFile | None, rank: int, with_time: bool):
        super().__init__(kind, file)
        self.last = b""  # the newest line with anything in it
        self._rank = rank
        self._with_time = with_time
        self._rest = b""  # the beginning of a line

    def feed(self, data: bytes, is_last: bool = False) -> None:
        lines = _LINE.findall(self._rest + data)
        self._rest = b""
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            if is_last:
                lines[-1] += b"\n"
            elif len(lines[-1]) < _MAX_LINE_BYTES:
                self._rest = lines.pop()
        self.last = next((s for line in reversed(lines) if (s := line.strip())), self.last)
        self._to_file(b"".join(lines))
        now = time.asctime() if self._with_time else ""
        prefix = f"{now}[{self._rank}]<{self._kind}>:".encode()
        self._to_console(b"".join(prefix + line for line in lines))


class _FileStream(_Stream):
    """Copies bytes to a log only."""

    def __init__(self, file: LogFile):
        super().__init__("stdout", file)

    def feed(self, data: bytes, is_last: bool = False) -> None:
        self._to_file(data)


class _ShownStream(_Stream):
    """Copies bytes to the console and text to a log; through a terminal if we have one."""

    def __init__(self, file: LogFile):
        super().__init__("stdout", file)
        self._bar_lock = threading.Lock()
        self._is_mid_line = False
        self._bar_height = 1  # lines that the newest redraw of a live bar erases
        self._text: TerminalText | None = None
        self._window_size = b""
        try:
            self.reader, self.writer = _open_terminal()
            self._text = TerminalText()
            self.wake()
        except OSError:
            self.reader, self.writer = os.pipe()

    def feed(self, data: bytes, is_last: bool = False) -> None:
        self._to_file(self._text.feed(data) if self._text else data)
        if self._text and is_last:
            self._to_file(self._text.flush())
        with self._bar_lock:
            self._to_console(data)
            self._note_position(data)

    def _note_position(self, data: bytes) -> None:
        visible = _ESCAPE.sub(b"", data)
        if visible:
            self._is_mid_line = not visible.endswith(b"\n")
        for erased in _REDRAW.finditer(data):
            self._bar_height = 1 + erased[0].count(b"\x1b[1A")

    def print_above(self, line: str) -> bool:
        """Prints a line in place of a live bar, which its process draws again below; False without one."""
        if self._text is None or not _is_one_terminal():
            return False
        if not self._bar_lock.acquire(timeout=_BAR_SECS):  # the terminal takes no output
            return False
        try:
            if not self._is_mid_line:
                return False
            above = self._bar_height - 1
            erase = "\r\x1b[2K" + "\x1b[1A\x1b[2K" * above
            self._to_console((erase + line + "\r\n" * (1 + above)).encode())
            return True
        finally:
            self._bar_lock.release()

    def wake(self) -> None:
        """Gives the process's terminal the size of ours, again after every change."""
        if self._text is None:
            return
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(_STDOUT, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            if size != self._window_size:
                fcntl.ioctl(self.reader, termios.TIOCSWINSZ, size)
                self._window_size = size


def _is_one_terminal() -> bool:
    """Returns True if stdout and stderr are the same terminal."""
    with contextlib.suppress(OSError):
        return os.isatty(2) and os.fstat(2).st_rdev == os.fstat(_STDOUT).st_rdev
    return False


def _open_terminal() -> tuple[int, int]:
    """A new terminal's two ends that passes bytes on as they are; OSError when stdout is no terminal."""
    if not os.isatty(_STDOUT):
        raise OSError("stdout is not a terminal")
    reader, writer = os.openpty()
    mode = termios.tcgetattr(writer)
    mode[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once
    termios.tcsetattr(writer, termios.TCSANOW, mode)
    return reader, writer


def _descriptor(console: IO[str]) -> int | None:
    """The file descriptor of a stream; None for a notebook's, and for one in memory."""
    with contextlib.suppress(OSError, ValueError):
        return console.fileno() if hasattr(console, "buffer") else None
    return None


def _ready(descriptors: Iterable[int], event: int = select.POLLIN) -> list[int]:
    """Those that are ready, after a short while at most; `select.select` has no room for many."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, event)
    return [descriptor for descriptor, _ in poll.poll(_WAKE_SECS * 1000)]
