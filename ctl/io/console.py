"""One line on stderr, words of others in it, and output whose reader may leave."""

import contextlib
import os
import sys
from collections.abc import Iterator

_MOST = 80


def say(text: str, by: str = "ctl launch") -> None:
    """Writes one line to stderr; a stderr that is gone is no reason to leave workers alone."""
    with contextlib.suppress(OSError):
        print(f"{by}: {text}", file=sys.stderr, flush=True)


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
