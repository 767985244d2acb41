"""The text of a terminal's bytes: escape sequences go, and of a line written over the last state stays.

text = TerminalText()
text.feed(b"10%\r20%\r\n")      -> b"20%\n"
tail(Path("job_0.log"), lines=20)
"""

import os
import re
from pathlib import Path

_MAX_OVERWRITTEN_BYTES = 8192  # more than this without a line end: drop what was written over
_MAX_TEXT_BYTES = 65536  # a longer line goes to the file in pieces
_TAIL_BYTES = 65536
_ESCAPE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor moves, erasing
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, hyperlinks
    rb"|\x1b[ -/]*[0-~]"  # the short ones
)
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f]")


class TerminalText:
    """Turns the bytes a terminal is sent into the lines a reader would see in the end."""

    def __init__(self) -> None:
        self._line = b""  # the bytes since the last line end

    def feed(self, data: bytes) -> bytes:
        """Takes more bytes and returns the lines they complete, each with its line end."""
        *done, self._line = (self._line + data).split(b"\n")
        plain = b"".join(_visible(line) + b"\n" for line in done)
        if len(self._line) > _MAX_OVERWRITTEN_BYTES and b"\r" in self._line:
            before, _, after = self._line.rpartition(b"\r")
            self._line = _visible(before) + b"\r" + after
        if len(self._line) > _MAX_TEXT_BYTES:
            plain, self._line = plain + _visible(self._line), b""
        return plain

    def flush(self) -> bytes:
        """Returns the last line, if it has no line end yet, with one."""
        line, self._line = _visible(self._line), b""
        return line + b"\n" if line else b""


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


def _visible(line: bytes) -> bytes:
    """What remains of a line after carriage returns: the last stretch with anything in it."""
    stretches = _CONTROL.sub(b"", _ESCAPE.sub(b"", line)).split(b"\r")
    return next((s for s in reversed(stretches) if s.strip()), b"")
