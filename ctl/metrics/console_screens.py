"""Where the bar is drawn: at the foot of a terminal, or in the output of a notebook's cell."""

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
    """Text that stays, and a bar that is drawn again and again in the same place."""

    @property
    def width(self) -> int:
        """Columns of the bar."""
        ...

    def print(self, block: RenderableType) -> None:
        """Shows what stays."""
        ...

    def open(self, draw: Callable[[], Text]) -> None:
        """Shows the bar that `draw` gives, until `close`."""
        ...

    def refresh(self) -> None:
        """Draws the bar again; nothing happens unless it is open."""
        ...

    def close(self) -> None:
        """Draws the bar once more and leaves it."""
        ...


class TerminalScreen:
    """What is printed stays above the bar."""

    def __init__(self, file: IO[str]) -> None:
        self._console = _TerminalConsole(
            file=file, force_terminal=True, force_jupyter=False, markup=False, emoji=False, highlight=False
        )
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler, Any]] = []  # redirected, with their own stream

    @property
    def width(self) -> int:
        return self._console.width

    def print(self, block: RenderableType) -> None:
        self._console.print(block, soft_wrap=isinstance(block, Text))

    def open(self, draw: Callable[[], Text]) -> None:
        ours = self._console.file is sys.stdout  # then print() goes above the bar
        self._live = live = Live(
            console=self._console,
            get_renderable=draw,
            auto_refresh=False,
            redirect_stdout=ours,
            redirect_stderr=ours and sys.stderr.isatty(),
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
        """Sends log records above the bar: handlers keep the stream that they were made with.

        Args:
          redirected: The id of a stream before the bar was opened -> the stream that replaces it.
        """
        absl = absl_handlers()
        for handler in [*logging.getLogger().handlers, *logging.getLogger("ctl").handlers, *absl]:
            stream = getattr(handler, "stream", None)
            new = redirected.get(id(stream))
            if isinstance(handler, logging.StreamHandler) and new is not None and new is not stream:
                handler.setStream(new)
                self._handlers.append((handler, stream))

    def _restore(self) -> None:
        """At exit without `Ended`: the cursor comes back."""
        with contextlib.suppress(Exception):
            self.close()


def absl_handlers() -> list[logging.Handler]:
    """Returns the handler that writes the records of absl's handler, if absl's logging is in use."""
    module = sys.modules.get("absl.logging")
    handler = None if module is None else module.get_absl_handler()
    return [] if handler is None else [handler.python_handler]


class NotebookScreen:
    """The bar is one display that is replaced, so a saved notebook has its last state; text is below it.

    `show(text)` displays a text and returns what replaces it, `replace(text)`.
    """

    width = _NOTEBOOK_COLUMNS

    def __init__(self, file: IO[str], show: Callable[[str], Callable[[str], Any]] | None = None) -> None:
        self._file, self._show = file, show or _displayed
        self._replace: Callable[[str], Any] | None = None
        self._draw: Callable[[], Text] = Text

    def print(self, block: RenderableType) -> None:
        self._file.write("".join(f"{line}\n" for line in text_lines(block)))
        self._file.flush()

    def open(self, draw: Callable[[], Text]) -> None:
        self._draw = draw
        self._replace = self._show(self._drawn())

    def refresh(self) -> None:
        if self._replace is not None:
            self._replace(self._drawn())

    def close(self) -> None:
        self.refresh()
        self._replace = None

    def _drawn(self) -> str:
        drawn = self._draw()
        lines = drawn.split("\n", allow_blank=True)
        for line in lines:
            line.truncate(self.width, overflow="ellipsis")
        return "\n".join(line.plain.rstrip() for line in lines)


def text_lines(block: RenderableType) -> list[str]:
    """A block without colours, as lines without spaces at their ends."""
    text = io.StringIO()
    console = Console(
        file=text, width=_TEXT_COLUMNS, color_system=None, legacy_windows=False, force_jupyter=False
    )
    console.print(block, soft_wrap=isinstance(block, Text))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def _displayed(text: str) -> Callable[[str], Any]:
    """Shows a text in the output of the cell that runs; returns what replaces it."""
    from IPython.display import display

    handle = display({"text/plain": text}, raw=True, display_id=True)
    return lambda newer: handle.update({"text/plain": newer}, raw=True)


class _TerminalConsole(Console):
    """rich ends the process when the pipe breaks; here that is one more error of a writer."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the terminal that showed the progress is gone")
