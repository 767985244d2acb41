"""What a user sees: a live bar on a terminal and in a notebook, plain lines everywhere else."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO

from ctl.io import notebook
from ctl.metrics.console_live import LiveConsole
from ctl.metrics.console_plain import PlainConsole
from ctl.metrics.console_screens import NotebookScreen, TerminalScreen
from ctl.metrics.protocol import Event, MetricWriter


class ConsoleWriter(MetricWriter):
    """Shows a run on `file`, by default standard output as it is when the writer is made.

    `live=None` takes the bar if `file` is a terminal that can move its cursor and show UTF-8, or the
    output of a notebook's cell. NO_COLOR is honoured. Errors of the file, such as BrokenPipeError, are
    raised.
    """

    def __init__(
        self,
        file: IO[str] | None = None,
        live: bool | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        shown_on = file or sys.stdout
        in_cell = shown_on is sys.stdout and notebook.shell() is not None
        if not (in_cell or _can_show_a_bar(shown_on) if live is None else live):
            self._shown: LiveConsole | PlainConsole = PlainConsole(shown_on, clock)
        else:
            screen = NotebookScreen(shown_on) if in_cell else TerminalScreen(shown_on)
            self._shown = LiveConsole(screen, clock)

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        self._shown.write(step, values, run)

    def note(self, event: Event) -> None:
        self._shown.note(event)


def _can_show_a_bar(file: IO[str]) -> bool:
    if not file.isatty() or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return False
    return (getattr(file, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
