"""Screens for a progress bar: the last lines of a terminal, or the output of a notebook cell."""

import atexit
import contextlib
import logging
import sys
from typing import IO, Any

from ctl.metrics.console_text import text_lines
from rich import get_console
from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.text import Text


class TerminalScreen:
    """Screen of a terminal: permanent text is printed above the bar.

    Attributes:
      console: Console that renders the bar.
    """

    def __init__(self, file: IO[str]) -> None:
        self.console: Console = _TerminalConsole(
            file=file, force_terminal=True, force_interactive=True, force_jupyter=False,
            markup=False, emoji=False, highlight=False,
        )  # fmt: skip
        self._bar: Progress | None = None
        self._handlers: list[tuple[logging.StreamHandler, Any]] = []  # redirected, with original stream

    def print(self, block: RenderableType) -> None:
        """Prints permanent text."""
        self.console.print(block, soft_wrap=isinstance(block, Text))

    def open(self, bar: Progress) -> None:
        """Shows the bar until `close`."""
        self._bar = bar
        atexit.register(self._restore)
        streams = sys.stdout, sys.stderr
        bar.start()
        self._redirect_handlers(dict(zip(map(id, streams), (sys.stdout, sys.stderr), strict=True)))

    def refresh(self) -> None:
        """Redraws the bar. A no-op if no bar is open."""
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Draws the bar a last time, and leaves it on the screen."""
        bar, self._bar = self._bar, None
        if bar is not None:
            atexit.unregister(self._restore)
            for handler, stream in self._handlers:
                handler.setStream(stream)
            self._handlers = []
            bar.stop()

    def _redirect_handlers(self, redirected: dict[int, Any]) -> None:
        """Redirects log handlers, which keep the stream of their construction, to write above the bar.

        Args:
          redirected: The replacement by the id of the stream that it replaces.
        """
        absl = absl_handlers()
        for handler in [*logging.getLogger().handlers, *logging.getLogger("ctl").handlers, *absl]:
            stream = getattr(handler, "stream", None)
            new = redirected.get(id(stream))
            if isinstance(handler, logging.StreamHandler) and new is not None and new is not stream:
                handler.setStream(new)
                self._handlers.append((handler, stream))

    def _restore(self) -> None:
        """Restores the cursor at the exit of a process that has sent no `Ended`."""
        with contextlib.suppress(Exception):
            self.close()


def absl_handlers() -> list[logging.Handler]:
    """Returns the handler that writes the records of absl's handler, if absl's logging is in use."""
    module = sys.modules.get("absl.logging")
    handler = None if module is None else module.get_absl_handler()
    return [] if handler is None else [handler.python_handler]


class NotebookScreen:
    """Screen of a notebook cell, with the methods of `TerminalScreen`. Permanent text is below the bar.

    The bar is one display that is replaced, so that a saved notebook contains its last state. A started
    `Progress` would need the package ipywidgets, and a saved notebook would not contain its bar.
    """

    def __init__(self, file: IO[str]) -> None:
        self.console = get_console()  # with which rich renders displays
        self._file = file
        self._bar: Progress | None = None
        self._handle: Any = None

    def print(self, block: RenderableType) -> None:
        """Prints text above the bar."""
        self._file.write("".join(f"{line}\n" for line in text_lines(block)))
        self._file.flush()

    def open(self, bar: Progress) -> None:
        """Displays a bar."""
        from IPython.display import display

        self._bar, self._handle = bar, display(_mime_bundle(bar), raw=True, display_id=True)

    def refresh(self) -> None:
        """Draws the bar again."""
        if self._bar is not None:
            self._handle.update(_mime_bundle(self._bar), raw=True)

    def close(self) -> None:
        """Draws the bar for the last time."""
        self.refresh()
        self._bar = self._handle = None


def _mime_bundle(bar: Progress) -> dict[str, str]:
    """Returns the bar as rich's HTML, and as text without colours."""
    bundle = bar._repr_mimebundle_((), ())  # type: ignore[misc]
    return {**bundle, "text/plain": "\n".join(text_lines(bar, bar.console.width))}


class _TerminalConsole(Console):
    """Console that raises BrokenPipeError, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the terminal that showed the progress is closed")
