"""One log file per worker, and the chief's output on the console as well.

    copy = ConsoleCopy(log_dir / "job_0.log")
    process = subprocess.Popen(command, stdout=copy.writer, stderr=subprocess.STDOUT)
    copy.start()
    ...
    copy.finish()

On a terminal the chief is given a terminal of its own, so that a live progress bar works. Its log
keeps the text only: escape sequences go, and of a line written over again and again the last stays.
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
from pathlib import Path

_CONSOLE = 1  # file descriptor of the launcher's stdout
_READ_BYTES = 65536
_WAKE_SECS = 0.1  # how soon the copy notices `finish` and a new window size
_DRAIN_SECS = 1.0  # for output still under way when the process has ended
_CONSOLE_SECS = 10.0  # for a console that takes it slowly, such as a pager
_OVERWRITTEN_BYTES = 8192  # more than this without a line end: drop what was written over
_LINE_BYTES = 65536  # a line longer than this goes to the file in pieces
_TAIL_BYTES = 65536

_ESCAPE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor moves, erasing
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, hyperlinks
    rb"|\x1b[ -/]*[0-~]"  # the short ones
)
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f]")


def tail(path: Path, lines: int = 20) -> str:
    """The last `lines` lines of a log, without escape sequences; "" when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return ""
    text = TerminalText()
    plain = text.feed(data) + text.flush()
    return "\n".join(plain.decode(errors="replace").split("\n")[:-1][-lines:])


class TerminalText:
    """Turns the bytes a terminal is sent into the lines a reader would have seen in the end."""

    def __init__(self):
        self._line = b""  # the bytes since the last line end

    def feed(self, data: bytes) -> bytes:
        """Takes more bytes and returns the lines they complete, each with its line end."""
        *done, self._line = (self._line + data).split(b"\n")
        plain = b"".join(_visible(line) + b"\n" for line in done)
        if len(self._line) > _OVERWRITTEN_BYTES and b"\r" in self._line:
            before, _, after = self._line.rpartition(b"\r")
            self._line = _visible(before) + b"\r" + after
        if len(self._line) > _LINE_BYTES:
            plain, self._line = plain + _visible(self._line), b""
        return plain

    def flush(self) -> bytes:
        """Returns the last line, if it has no line end yet, with one."""
        line, self._line = _visible(self._line), b""
        return line + b"\n" if line else b""


def _visible(line: bytes) -> bytes:
    """What remains of a line after carriage returns: the last stretch with anything in it."""
    stretches = _CONTROL.sub(b"", _ESCAPE.sub(b"", line)).split(b"\r")
    return next((s for s in reversed(stretches) if s.strip()), b"")


class ConsoleCopy:
    """Copies what a process writes to a log file and, byte for byte, to the launcher's stdout.

    Attributes:
      writer: the file descriptor the process gets as stdout and stderr, until `start`.

    A console that goes away (`| head`) or a full disk ends that copy only, never the process.
    Raises OSError when the log cannot be written.
    """

    def __init__(self, path: Path):
        with open(path, "wb"):  # what an earlier start left
            pass
        self._log = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by the thread)
        self._window_size = b""
        self._text = None
        try:
            self._reader, self.writer = _open_terminal()
            self._text = TerminalText()
            self._follow_window_size()
        except OSError:
            self._reader, self.writer = os.pipe()
        self._console_open = self._log_open = True
        self._finish_by_secs: float | None = None
        self._thread = threading.Thread(target=self._copy, name="console-copy", daemon=True)

    def start(self) -> None:
        """Gives up `writer`, which the process has by now, and begins to copy in a thread."""
        os.close(self.writer)
        self._thread.start()

    def finish(self) -> None:
        """Copies what is still under way, for ten seconds at most, and closes the log."""
        self._finish_by_secs = time.monotonic() + _DRAIN_SECS
        self._thread.join(_CONSOLE_SECS)

    def _copy(self) -> None:
        while True:
            if self._text:
                self._follow_window_size()
            if not _is_ready(self._reader, select.POLLIN):
                if self._finish_by_secs is None or time.monotonic() < self._finish_by_secs:
                    continue
                break  # a process that left the group holds the writer
            try:
                data = os.read(self._reader, _READ_BYTES)
            except OSError:  # how Linux says that a terminal has no writer left
                break
            if not data:
                break
            self._to_log(self._text.feed(data) if self._text else data)
            self._to_console(data)
        if self._text:
            self._to_log(self._text.flush())
        self._log.close()
        os.close(self._reader)

    def _to_log(self, data: bytes) -> None:
        if self._log_open and data:
            try:
                self._log.write(data)
            except OSError as e:
                self._log_open = False
                with contextlib.suppress(OSError):
                    print(f"ctl launch: {self._log.name} ends here: {e.strerror}", file=sys.stderr)

    def _to_console(self, data: bytes) -> None:
        while self._console_open and data:
            try:
                data = data[os.write(_CONSOLE, data) :]
            except BlockingIOError:
                _is_ready(_CONSOLE, select.POLLOUT)
            except OSError:
                self._console_open = False

    def _follow_window_size(self) -> None:
        """Gives the chief's terminal the size of ours, again after every change."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(_CONSOLE, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            if size != self._window_size:
                fcntl.ioctl(self._reader, termios.TIOCSWINSZ, size)
                self._window_size = size


def _open_terminal() -> tuple[int, int]:
    """A new terminal's two ends that passes bytes on as they are; OSError when we are on none."""
    if not os.isatty(_CONSOLE):
        raise OSError("stdout is not a terminal")
    reader, writer = os.openpty()
    mode = termios.tcgetattr(writer)
    mode[1] &= ~termios.OPOST  # the real terminal turns \n into \r\n, once
    termios.tcsetattr(writer, termios.TCSANOW, mode)
    return reader, writer


def _is_ready(descriptor: int, event: int) -> bool:
    """Waits a little; for descriptors of any number, which `select.select` does not take."""
    poller = select.poll()
    poller.register(descriptor, event)
    return bool(poller.poll(1000 * _WAKE_SECS))
