"""Short reports of uncaught errors: the frames of the user's code, the error, and its notes.

The reports omit the frames of TensorFlow, Keras and ctl, the code that AutoGraph generates, and C++ stack
traces. `--full_traceback` or TF_CPP_MIN_LOG_LEVEL=0 shows them.
"""

import contextlib
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from types import TracebackType

from ctl.errors import CtlError

LIBRARIES = ("site-packages", "dist-packages", "__autograph_generated_file", "<frozen ", "<string>")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_NODE_LINE = re.compile(  # lines of TensorFlow that name nodes of the graph, or count errors
    r"\[\[|Detected at node|Graph execution error|<stack traces unavailable>|in user code:$"
    r"|\d+ root error|\([1-9]\d*\) [A-Z_]+: |\d+ (successful operations|derived errors)"
)
_OPERATION = re.compile(r"\s*\[Op:\w+\]( name:)?\s*$")
_FIRST_ROOT = re.compile(r"^\s*\(0\) [A-Z_]+:\s+")
_MAX_LINE_LENGTH = 300  # characters
_MAX_LINES = 40
_HINT = "(--full_traceback or TF_CPP_MIN_LOG_LEVEL=0 shows all frames)"
_is_full = False


def show_full_tracebacks() -> None:
    """Disables short reports in this process."""
    global _is_full  # noqa: PLW0603  a setting of the process
    _is_full = True


def can_shorten(error: BaseException) -> bool:
    """Returns True if the frames of the user's code suffice for an error that passed through ctl.

    Returns False if ctl itself raised the error, or if full tracebacks were requested.
    """
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if _is_full or os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0" or not any(map(_is_ctl_file, names)):
        return False
    if isinstance(error, CtlError) or _FRAME.search(shortened(str(error), (*LIBRARIES, _PACKAGE))):
        return True
    return not _is_ctl_file([name for name in names if not _is_library_file(name)][-1])


def short_report(error: BaseException, trace: TracebackType | None = None) -> str:
    """Returns the frames of the user's code, the class and message of `error`, and its notes, as lines."""
    is_own = isinstance(error, CtlError)  # its message is short
    text = str(error) if is_own else shortened(str(error), (*LIBRARIES, _PACKAGE))
    name = type(error).__name__
    lines = [f"Traceback of your code {_HINT}:"]
    if _FRAME.search(text) and not is_own:  # the message contains the frames of the step
        body, _, last = text.rpartition("\n")
        lines += [*_format_frames(trace or error.__traceback__), *([body.strip("\n")] if body else [])]
        last = last.strip()
        lines.append(last if last.startswith(name) else f"{name}: {last}")
    else:
        lines += [*_format_frames(trace or error.__traceback__), f"{name}: {text}".rstrip(": ")]
    return "\n".join([*lines, *getattr(error, "__notes__", ())])


def add_note(error: BaseException, note: str) -> None:
    """Adds a line that reports and Python's tracebacks show after the message."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]


def mark_as_common(error: BaseException) -> None:
    """Marks an error that every worker of the job raises. Only one worker has to report it."""
    error.__dict__["is_common_to_workers"] = True


def is_common(error: BaseException) -> bool:
    """Returns True if `mark_as_common` was called for this error."""
    return bool(error.__dict__.get("is_common_to_workers", False))


def shortened(text: str, libraries: tuple[str, ...]) -> str:
    """Returns an error message without colors, frames in `libraries`, and TensorFlow's node names."""
    lines_to_show: list[str] = []
    frames, skips, skipped_indent = set[str](), False, 0
    for line in _COLORS.sub("", text).splitlines():
        content, indent = line.strip(), len(line) - len(line.lstrip())
        frame = _FRAME.match(content)
        if frame:
            skips, skipped_indent = True, indent  # skips the source line that follows
            is_library = any(part in frame[1] for part in libraries)
            if not (is_library or frame[1].startswith(_STANDARD_LIBRARY) or frame[0] in frames):
                frames.add(frame[0])
                source = linecache.getline(frame[1], int(frame[2])).strip()
                lines_to_show += [f"  {content.rstrip(' *')}", *([f"    {source}"] if source else [])]
        elif content.startswith("Arguments received by"):
            break  # Keras repeats the arguments of the layer; the message contains their shapes
        elif content and not (skips and indent > skipped_indent) and not _NODE_LINE.match(content):
            skips = False
            lines_to_show.append(_FIRST_ROOT.sub("", _OPERATION.sub("", line.rstrip()))[:_MAX_LINE_LENGTH])
    if len(lines_to_show) > _MAX_LINES:
        lines_to_show = [*lines_to_show[: _MAX_LINES // 2], "  ...", *lines_to_show[-_MAX_LINES // 2 :]]
    return "\n".join(lines_to_show)


def user_line(text: str) -> str:
    """Returns the newest frame of the user's code in an error message, as ' (File ..., line 3, in f)'."""
    frames = list(_FRAME.finditer(shortened(text, (*LIBRARIES, _PACKAGE))))
    return f" ({frames[-1][0]})" if frames else ""


def core(text: str) -> str:
    """Returns the sentence of a TensorFlow error, without the location of the node's definition."""
    lines = [line.strip() for line in shortened(text, ("",)).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def ctl_error_in(error: BaseException | None) -> CtlError | None:
    """Returns the first error of ctl in a chain of errors, or None."""
    while error is not None and not isinstance(error, CtlError):
        error = error.__cause__ or error.__context__
    return error


def _format_frames(trace: TracebackType | None) -> list[str]:
    """Returns the lines of the frames in the user's files."""
    lines = []
    for frame in traceback.extract_tb(trace):
        name = frame.filename
        if not _is_library_file(name) and not _is_ctl_file(name):
            lines.append(f'  File "{name}", line {frame.lineno}, in {frame.name}')
            lines += [f"    {frame.line}"] if frame.line else []
    return lines


def _is_library_file(filename: str) -> bool:
    return any(part in filename for part in LIBRARIES) or filename.startswith(_STANDARD_LIBRARY)


def _is_ctl_file(filename: str) -> bool:
    return os.path.abspath(filename).startswith(_PACKAGE + os.sep)


class ExampleError(Exception):
    """An error of the user's code that reads an example, with the number of the example."""


@contextlib.contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Names the example in errors of the user's code, which keep their traceback."""
    try:
        yield
    except (CtlError, MemoryError, NotImplementedError):  # have explanations by their types
        raise
    except Exception as e:
        message = f"{name}: {type(e).__name__}: {e}"
        raise ExampleError(message).with_traceback(e.__traceback__) from None
