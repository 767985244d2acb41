"""Output of the processes of a job, which one thread copies to files and to the console.

    output = LogOutput(log_dir, tasks, max_bytes=2**28)     # ctl launch: one log per process
    output = RankOutput(directory=None, count=2)            # ctlrun: lines with the rank as a prefix
    out, err = output.open_writers(task)                         # file descriptors for the process

A closed console (`| head`) or a full disk ends that copy only, never the process.
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
_WAKE_SECS = 0.1  # interval for noticing `finish`, new streams and a new window size
_BAR_SECS = 1.0  # for pending output, before a message of the launcher
_DRAIN_SECS = 1.0  # for pending output after all processes have ended
_FINISH_SECS = 10.0  # for a slow console, such as a pager
_MAX_LINE_BYTES = 65536  # a longer line is split
_ESCAPE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
_REDRAW = re.compile(rb"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])|[^\r\n]+")


class _Stream:
    """Copy of one stream of a process to a file and to the launcher's stream of this type."""

    def __init__(self, stream_name: str, file: LogFile | None):
        self._stream_name = stream_name
        self._file = file
        self._has_console = True
        self.has_ended = threading.Event()  # set when all output has been copied

    def feed(self, data: bytes, is_last: bool = False) -> None:
        """Copies the data."""
        raise NotImplementedError

    def update(self) -> None:
        """Performs periodic work. Called at least every 0.1 s."""

    def close(self) -> None:
        """Copies the remaining data."""
        self.feed(b"", is_last=True)
        if self._file:
            self._file.close()
        self.has_ended.set()

    def _to_file(self, data: bytes) -> None:
        if self._file and data:
            self._file.write(data)

    def _to_console(self, data: bytes) -> None:
        console = getattr(sys, self._stream_name)
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
                _poll_descriptors([console.fileno()], select.POLLOUT)
            except (OSError, ValueError):
                self._has_console = False


class Output:
    """A thread that copies streams until `finish`. Subclasses define the streams of a process."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}  # by the descriptor of the read end
        self._writers: dict[str, list[int]] = {}  # by the name of the log
        self._stream_ends: dict[str, list[threading.Event]] = {}  # by the name of the log
        self._lock = threading.Lock()
        self._finish_by_secs: float | None = None
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)

    def open_writers(self, task: Topology) -> tuple[int, int]:
        """Returns file descriptors for the stdout and the stderr of a process."""
        raise NotImplementedError

    def limit_logs(self, tasks: Iterable[Topology]) -> None:
        """Limits the sizes of the logs of running processes."""

    def append_line(self, task: Topology, text: str) -> None:
        """Adds a line to the log of a process, if it has one."""

    def close_writers(self, task: Topology) -> None:
        """Closes the launcher's descriptors, after the process has started or failed to start."""
        for writer in self._writers.pop(log_name(task), ()):
            os.close(writer)

    def start(self) -> None:
        """Starts to copy, preferably after the first forks, because threads and forks do not mix."""
        self._thread.start()

    def drain(self, task: Topology) -> None:
        """Waits until the output of a process that has ended is copied, for one second at most."""
        deadline_secs = time.monotonic() + _DRAIN_SECS  # a process in another session may hold the pipe
        for has_ended in self._stream_ends.pop(log_name(task), ()) if self._thread.is_alive() else ():
            has_ended.wait(max(0.0, deadline_secs - time.monotonic()))

    def finish(self) -> None:
        """Copies the pending output, for ten seconds at most."""
        for descriptors in self._writers.values():
            for descriptor in descriptors:
                os.close(descriptor)
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
            ready_readers = _poll_descriptors(streams)
            for reader in ready_readers:
                self._read(reader)
            for stream in streams.values():
                stream.update()
            deadline_secs = self._finish_by_secs
            if deadline_secs and not ready_readers and (not streams or time.monotonic() >= deadline_secs):
                break  # a process that left its group may hold a writer
        for reader in list(self._streams):
            self._close(reader)

    def _read(self, reader: int) -> None:
        data = b""
        with contextlib.suppress(OSError):  # Linux reports a terminal without a writer as an error
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
    """A log per process. The first process's output is also on the console, byte for byte.

    On a terminal that process gets its own terminal, so a live progress bar works. Its log
    contains the text only.
    """

    def __init__(self, log_dir: Path, tasks: Sequence[Topology], max_bytes: int = 0):
        """Stores the settings. `max_bytes` is the limit of one log, 0 for no limit."""
        super().__init__()
        self._log_dir = log_dir
        self._console_task = tasks[0]
        self._limit = LogSizeLimit(max_bytes)
        self._opened: set[str] = set()
        self._console_stream: _ConsoleStream | None = None

    def open_writers(self, task: Topology) -> tuple[int, int]:
        """Overwrites an earlier log, or continues it if the process is restarted."""
        file = LogFile(self.path(task), "ctl launch", is_new=log_name(task) not in self._opened)
        self._opened.add(log_name(task))
        if task == self._console_task:
            self._console_stream = console_stream = _ConsoleStream(file)
            writer = console_stream.writer
            self._add(task, console_stream.reader, writer, console_stream)
        else:
            reader, writer = os.pipe()
            self._add(task, reader, writer, _FileStream(file))
        return writer, writer

    def start(self) -> None:
        """Starts to copy. Messages of the launcher appear above a live progress bar."""
        super().start()
        if self._console_stream is not None:
            set_printer(self._console_stream.print_above)

    def finish(self) -> None:
        """Copies the pending output, for ten seconds at most. Then messages go to stderr again."""
        super().finish()
        set_printer(None)

    def path(self, task: Topology) -> Path:
        """Returns the path of the log of a process."""
        return self._log_dir / log_name(task)

    def append_line(self, task: Topology, text: str) -> None:
        """Adds a line. A write error is ignored."""
        with contextlib.suppress(OSError), open(self.path(task), "ab") as file:
            file.write(f"ctl launch: {text}\n".encode())

    def limit_logs(self, tasks: Iterable[Topology]) -> None:
        """Cuts the logs of these processes that are above the size limit, at most once a second."""
        self._limit.apply(map(self.path, tasks))


class RankOutput(Output):
    r"""Lines of all ranks on the launcher's stdout and stderr, and in files if there is a directory.

    A line ends with \n, or with \r in progress bars.
    """

    def __init__(self, *, directory: str | None = None, with_time: bool = False, count: int = 1):
        """Stores the settings. `count` processes determine the width of the numbers in directory names."""
        super().__init__()
        self._directory = Path(directory) if directory else None
        self._with_time = with_time
        self._digits = len(str(max(count - 1, 0)))
        self._errors: dict[int, _LineStream] = {}

    def open_writers(self, task: Topology) -> tuple[int, int]:
        """Returns two pipes. Raises UsageError if a file cannot be written."""
        descriptors = []
        for stream_name in ("stdout", "stderr"):
            stream = _LineStream(
                stream_name, self._file(task, stream_name), task.task_index, self._with_time
            )
            reader, writer = os.pipe()
            self._add(task, reader, writer, stream)
            descriptors.append(writer)
        self._errors[task.task_index] = stream
        return descriptors[0], descriptors[1]

    def last_error(self, task: Topology) -> str:
        """Returns the last line of the stderr of a process that has ended. Waits for its copy."""
        stream = self._errors.get(task.task_index)
        if stream is None:
            return ""
        stream.has_ended.wait(_DRAIN_SECS)  # with a timeout: a child in another session may hold the pipe
        return stream.last.decode(errors="replace")

    def _file(self, task: Topology, stream_name: str) -> LogFile | None:
        if self._directory is None:
            return None
        path = self._directory / f"rank.{task.task_index:0{self._digits}d}" / stream_name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("wb").close()
        except OSError as e:
            if disk_errors.is_transient(e):
                return LogFile(path, "ctlrun")
            raise UsageError(
                f"--output-filename: {path} cannot be written ({e.strerror}); specify a writable directory"
            ) from None
        return LogFile(path, "ctlrun", is_new=False)


class _LineStream(_Stream):
    """Copy of whole lines, with the rank as a prefix on the console."""

    def __init__(self, stream_name: str, file: LogFile | None, rank: int, with_time: bool):
        super().__init__(stream_name, file)
        self.last = b""  # the newest line that is not blank
        self._rank = rank
        self._with_time = with_time
        self._partial_line = b""  # the beginning of a line

    def feed(self, data: bytes, is_last: bool = False) -> None:
        lines = _LINE.findall(self._partial_line + data)
        self._partial_line = b""
        if lines and not lines[-1].endswith((b"\n", b"\r")):
            if is_last:
                lines[-1] += b"\n"
            elif len(lines[-1]) < _MAX_LINE_BYTES:
                self._partial_line = lines.pop()
        self.last = next((s for line in reversed(lines) if (s := line.strip())), self.last)
        self._to_file(b"".join(lines))
        timestamp = time.asctime() if self._with_time else ""
        prefix = f"{timestamp}[{self._rank}]<{self._stream_name}>:".encode()
        self._to_console(b"".join(prefix + line for line in lines))


class _FileStream(_Stream):
    """Copy of bytes to a log only."""

    def __init__(self, file: LogFile):
        super().__init__("stdout", file)

    def feed(self, data: bytes, is_last: bool = False) -> None:
        self._to_file(data)


class _ConsoleStream(_Stream):
    """Copy of bytes to the console and text to a log, through a terminal if stdout is one."""

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
            self.update()
        except OSError:
            self.reader, self.writer = os.pipe()

    def feed(self, data: bytes, is_last: bool = False) -> None:
        self._to_file(self._text.feed(data) if self._text else data)
        if self._text and is_last:
            self._to_file(self._text.flush())
        with self._bar_lock:
            self._to_console(data)
            self._track_cursor(data)

    def _track_cursor(self, data: bytes) -> None:
        visible = _ESCAPE.sub(b"", data)
        if visible:
            self._is_mid_line = not visible.endswith(b"\n")
        for erased in _REDRAW.finditer(data):
            self._bar_height = 1 + erased[0].count(b"\x1b[1A")

    def print_above(self, line: str) -> bool:
        """Replaces a live bar with a line; its process redraws the bar. Returns False without one."""
        if self._text is None or not _is_one_terminal():
            return False
        if not self._bar_lock.acquire(timeout=_BAR_SECS):  # the terminal accepts no output
            return False
        try:
            if not self._is_mid_line:
                return False
            lines_above = self._bar_height - 1
            erase = "\r\x1b[2K" + "\x1b[1A\x1b[2K" * lines_above
            self._to_console((erase + line + "\r\n" * (1 + lines_above)).encode())
            return True
        finally:
            self._bar_lock.release()

    def update(self) -> None:
        """Sets the window size of the process's terminal to that of stdout after every change."""
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
    """Returns both ends of a new terminal without output processing. Raises OSError if stdout is none."""
    if not os.isatty(_STDOUT):
        raise OSError("stdout is not a terminal")
    reader, writer = os.openpty()
    mode = termios.tcgetattr(writer)
    mode[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once
    termios.tcsetattr(writer, termios.TCSANOW, mode)
    return reader, writer


def _descriptor(console: IO[str]) -> int | None:
    """Returns the file descriptor of a stream, or None for a notebook and for a stream in memory."""
    with contextlib.suppress(OSError, ValueError):
        return console.fileno() if hasattr(console, "buffer") else None
    return None


def _poll_descriptors(descriptors: Iterable[int], event_mask: int = select.POLLIN) -> list[int]:
    """Returns the ready descriptors within 0.1 s. `select.select` is limited to small descriptors."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, event_mask)
    return [descriptor for descriptor, _ in poll.poll(_WAKE_SECS * 1000)]
