"""One line on stderr, words of others in it, and output whose reader may leave."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

_MOST = 80


_printer: Callable[[str], bool] | None = None


def say(text: str, by: str = "ctl launch") -> None:
    """Writes one line to stderr, or above a live progress bar; write errors are ignored."""
    line = f"{by}: {text}"
    with contextlib.suppress(OSError):
        if _printer is None or not _printer(line):
            print(line, file=sys.stderr, flush=True)


def set_printer(printer: Callable[[str], bool] | None) -> None:
    """Sets the function that prints the lines of `say`. It returns False to leave a line to stderr."""
    global _printer  # noqa: PLW0603
    _printer = printer


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Within the block, a reader of stdout who has seen enough (`ctl --help | head -1`) is no error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def quoted(text: str, most: int = _MOST) -> str:
    """Somebody's words in quotes on one line, not more than `most` of them."""
    return repr(text if len(text) <= most else text[: most - 3] + "...")
