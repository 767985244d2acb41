"""Messages on stderr, quotation of user input, and closed output pipes."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

_MAX_QUOTED = 80  # characters
_printer: Callable[[str], bool] | None = None


def print_message(text: str, program: str = "ctl launch") -> None:
    """Prints "<program>: <text>" on stderr, or above a live progress bar. Write errors are ignored."""
    line = f"{program}: {text}"
    with contextlib.suppress(OSError):
        if _printer is None or not _printer(line):
            print(line, file=sys.stderr, flush=True)


def set_printer(printer: Callable[[str], bool] | None) -> None:
    """Sets the function that prints the lines of `print_message`. If it returns False, stderr is used."""
    global _printer  # noqa: PLW0603
    _printer = printer


@contextlib.contextmanager
def ignore_closed_stdout() -> Iterator[None]:
    """Ignores a closed stdout pipe within the block, as in `ctl --help | head -1`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quoted(text: str, max_length: int = _MAX_QUOTED) -> str:
    """Returns `text` in quotes on one line, truncated to `max_length` characters."""
    return repr(text if len(text) <= max_length else text[: max_length - 3] + "...")
