"""Ctrl-C and SIGTERM: the first asks for a checkpoint and an orderly end, the second ends at once."""

import os
import signal
import sys

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_SHOW_CURSOR = "\x1b[?25h"


class Signals:
    """While active, remembers the first signal; also under strategies that take SIGTERM for themselves.

    TensorFlow's multi-worker runtime swallows SIGTERM; a handler installed after the strategy was
    made works again, so this must be entered after that. Outside the main thread it does nothing.

    >>> with Signals() as signals:
    ...     if signals.received: ...
    """

    def __init__(self):
        self.received: int | None = None
        self._previous: dict = {}

    def __enter__(self) -> "Signals":
        for number in _EXIT_CODES:
            try:
                self._previous[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number, frame) -> None:
        if self.received is None:
            self.received = number
            return
        if sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)
        os._exit(_EXIT_CODES[signal.Signals(number)])


def exit_code(number: int) -> int:
    """The exit code for an orderly end after signal `number`."""
    return _EXIT_CODES.get(signal.Signals(number), 128 + number)


def name(number: int) -> str:
    """ "Ctrl-C" or "SIGTERM"."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
