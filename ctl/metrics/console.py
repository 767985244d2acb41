"""Console output: a progress bar in a terminal or notebook, else plain lines."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any

from ctl.io import notebook
from ctl.metrics.console_plain import PlainConsole
from ctl.metrics.protocol import Event, MetricWriter

if TYPE_CHECKING:
    from ctl.metrics.console_screens import NotebookScreen, TerminalScreen


class ConsoleWriter(MetricWriter):
    """Metric writer for the console.

    It respects NO_COLOR, and raises errors of the file such as BrokenPipeError.

    Args:
      file: Text file to write to. None: `sys.stdout` at the time of the call.
      live: True for a progress bar, False for plain lines. None: a bar if `file` is a terminal that can
        move its cursor and show UTF-8, or the output of a notebook cell.
      clock: Function that returns the time (seconds), for rates.
    """

    def __init__(
        self,
        file: IO[str] | None = None,
        live: bool | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        output, screen = open_screen(file, live)
        if screen is None:
            self._console: Any = PlainConsole(output, clock)
        else:
            # Imported here, as `rich.progress` takes time.
            from ctl.metrics.console_live import LiveConsole

            self._console = LiveConsole(screen, clock)

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Prints metrics or adds them to the progress bar."""
        self._console.write(step, values, run)

    def note(self, event: Event) -> None:
        """Prints an event of a run."""
        self._console.note(event)


def open_screen(
    file: IO[str] | None, live: bool | None
) -> "tuple[IO[str], TerminalScreen | NotebookScreen | None]":
    """Returns the output file, and a screen for a bar or None for lines, as for `ConsoleWriter`."""
    output = file or sys.stdout
    is_notebook = output is sys.stdout and notebook.shell() is not None
    if not (is_notebook or _supports_bar(output) if live is None else live):
        return output, None
    from ctl.metrics.console_screens import NotebookScreen, TerminalScreen

    return output, NotebookScreen(output) if is_notebook else TerminalScreen(output)


def _supports_bar(file: IO[str]) -> bool:
    if not file.isatty() or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return False
    return (getattr(file, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
