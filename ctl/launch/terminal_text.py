r"""Conversion of terminal output to plain text, without escape sequences and overwritten text.

text = TerminalText()
text.feed(b"10%\r20%\r\n")      -> b"20%\n"
read_tail(Path("job_0.log"), lines=20)
"""

import os
import re
from pathlib import Path

_MAX_OVERWRITTEN_BYTES = 8192  # limit without a line end; above it overwritten text is dropped
_MAX_TEXT_BYTES = 65536  # a longer line is written in pieces
_TAIL_BYTES = 65536
_ESCAPE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor moves, erasing
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, hyperlinks
    rb"|\x1b[ -/]*[0-~]"  # short sequences
)
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f]")


class TerminalText:
    """Converter of terminal output to plain text lines."""

    def __init__(self) -> None:
        self._line = b""  # bytes since the last line end

    def feed(self, data: bytes) -> bytes:
        """Adds bytes. Returns the completed lines, each with its line end."""
        *complete_lines, self._line = (self._line + data).split(b"\n")
        plain_text = b"".join(_visible_text(line) + b"\n" for line in complete_lines)
        if len(self._line) > _MAX_OVERWRITTEN_BYTES and b"\r" in self._line:
            complete_part, _, last_part = self._line.rpartition(b"\r")
            self._line = _visible_text(complete_part) + b"\r" + last_part
        if len(self._line) > _MAX_TEXT_BYTES:
            plain_text, self._line = plain_text + _visible_text(self._line), b""
        return plain_text

    def flush(self) -> bytes:
        """Returns the last line with a line end, if it has none yet."""
        line, self._line = _visible_text(self._line), b""
        return line + b"\n" if line else b""


def read_tail(path: Path, lines: int = 20) -> str:
    """Returns the last `lines` lines of a log without escape sequences, or "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            data = file.read()
    except OSError:
        return ""
    text = TerminalText()
    plain_text = text.feed(data) + text.flush()
    return "\n".join(plain_text.decode(errors="replace").split("\n")[:-1][-lines:])


def _visible_text(line: bytes) -> bytes:
    """Returns the visible part of a line with carriage returns: the last part that is not blank."""
    segments = _CONTROL.sub(b"", _ESCAPE.sub(b"", line)).split(b"\r")
    return next((s for s in reversed(segments) if s.strip()), b"")
