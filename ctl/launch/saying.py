"""One line on stderr."""

import contextlib
import sys


def say(text: str) -> None:
    """Writes one line to stderr; a stderr that is gone is no reason to leave workers alone."""
    with contextlib.suppress(OSError):
        print(f"ctl launch: {text}", file=sys.stderr, flush=True)
