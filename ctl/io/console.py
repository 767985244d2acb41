"""One line on stderr, and words of others in it."""

import contextlib
import sys

_MOST = 80


def say(text: str, by: str = "ctl launch") -> None:
    """Writes one line to stderr; a stderr that is gone is no reason to leave workers alone."""
    with contextlib.suppress(OSError):
        print(f"{by}: {text}", file=sys.stderr, flush=True)


def quoted(text: str, most: int = _MOST) -> str:
    """Somebody's words in quotes on one line, not more than `most` of them."""
    return repr(text if len(text) <= most else text[: most - 3] + "...")
