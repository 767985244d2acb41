"""Screens for a progress bar: the last lines of a terminal, or the output of a notebook cell."""

import atexit
import contextlib
import io
import logging
import sys
from collections.abc import Callable
from typing import IO, Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

_NOTEBOOK_COLUMNS = 110
_TEXT_COLUMNS = 200


class Screen(Protocol):
    """Output with permanent text and a progress bar that is redrawn in place."""

    @property
    def width(self) -> int:
        """Width of the bar (columns)."""
        ...

    def print(self, block: RenderableType) -> None:
        """Prints permanent text."""
        ...

    def open(self, draw: Callable[[], Text]) -> None:
        """Shows the bar that `draw` returns, until `close`."""
        ...

    def refresh(self) -> None:
        """Redraws the bar. A no-op if no bar is open."""
        ...

    def close(self) -> None:
        """Draws the bar a last time, and leaves it on the screen."""
        ...


class TerminalScreen:
    """Screen of a terminal: permanent text is printed above the bar."""

    def __init__(self, file: IO[str]) -> None:
        self._console = _TerminalConsole(
            file=file, force_terminal=True, force_jupyter=False, markup=False, emoji=False, highlight=False
        )
        self._live: Live | None = None
        self._handlers: list[
            tuple[logging.StreamHandler, Any]
        ] = []  # redirected, with their original stream

    @property
    def width(self) -> int:
        return self._console.width

    def print(self, block: RenderableType) -> None:
        self._console.print(block, soft_wrap=isinstance(block, Text))

    def open(self, draw: Callable[[], Text]) -> None:
        is_stdout = self._console.file is sys.stdout  # then print() writes above the bar
        self._live = live = Live(
            console=self._console,
            get_renderable=draw,
            auto_refresh=False,
            redirect_stdout=is_stdout,
            redirect_stderr=is_stdout and sys.stderr.isatty(),
        )
        atexit.register(self._restore)
        streams = sys.stdout, sys.stderr
        live.start(refresh=True)
        self._redirect_handlers(dict(zip(map(id, streams), (sys.stdout, sys.stderr), strict=True)))

    def refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self._restore)
            for handler, stream in self._handlers:
                handler.setStream(stream)
            self._handlers = []
            live.stop()  # draws the newest state once more

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
    """Screen of a notebook cell: permanent text is printed below the bar.

    The bar is one display that is replaced, so that a saved notebook contains its last state.

    Args:
      file: Output of the cell.
      show: Function that displays a text, and returns a function that replaces the text.
    """

    width = _NOTEBOOK_COLUMNS

    def __init__(self, file: IO[str], show: Callable[[str], Callable[[str], Any]] | None = None) -> None:
        self._file, self._show = file, show or _display
        self._replace: Callable[[str], Any] | None = None
        self._draw: Callable[[], Text] = Text

    def print(self, block: RenderableType) -> None:
        self._file.write("".join(f"{line}\n" for line in text_lines(block)))
        self._file.flush()

    def open(self, draw: Callable[[], Text]) -> None:
        self._draw = draw
        self._replace = self._show(self._bar())

    def refresh(self) -> None:
        if self._replace is not None:
            self._replace(self._bar())

    def close(self) -> None:
        self.refresh()
        self._replace = None

    def _bar(self) -> str:
        lines = self._draw().split("\n", allow_blank=True)
        for line in lines:
            line.truncate(self.width, overflow="ellipsis")
        return "\n".join(line.plain.rstrip() for line in lines)


def text_lines(block: RenderableType) -> list[str]:
    """Returns a block as lines without colours and trailing spaces."""
    text = io.StringIO()
    console = Console(
        file=text, width=_TEXT_COLUMNS, color_system=None, legacy_windows=False, force_jupyter=False
    )
    console.print(block, soft_wrap=isinstance(block, Text))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _display(text: str) -> Callable[[str], Any]:
    """Displays a text in the running cell, and returns a function that replaces the text."""
    from IPython.display import display

    handle = display({"text/plain": text}, raw=True, display_id=True)
    return lambda newer: handle.update({"text/plain": newer}, raw=True)


class _TerminalConsole(Console):
    """Console that raises BrokenPipeError, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the terminal that showed the progress is closed")
