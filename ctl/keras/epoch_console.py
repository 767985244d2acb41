"""Console of `ctl.fit`, which prints a line for each epoch.

Epoch 2/5
32/32 - 1s - 31ms/step - accuracy: 0.9012 - loss: 0.2301 - val_accuracy: 0.8914 - val_loss: 0.2514
"""

import time
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING

from ctl.keras.callbacks import is_metric_of_keras
from ctl.keras.data import Epochs
from ctl.metrics.console import open_screen
from ctl.metrics.console_text import (
    encodable,
    format_duration,
    format_number,
    run_footer,
    run_header,
    text_lines,
)
from ctl.metrics.protocol import Ended, Event, MetricWriter, Progressed, Started
from rich.console import RenderableType
from rich.table import Column
from rich.text import Text

if TYPE_CHECKING:
    from ctl.metrics.console_screens import NotebookScreen, TerminalScreen
    from rich.progress import Progress

_BAR_COLUMNS = 20
_REDRAW_SECS = 0.1


class EpochConsole(MetricWriter):
    """Metric writer for the console, with a bar or a line for each epoch of `ctl.fit`.

    Args:
      plan: Epochs of the training.
      file: Text file to write to. None: `sys.stdout` at the time of the call.
      live: True for bars, False for lines. None: as for `ctl.ConsoleWriter`.
      clock: Function that returns the time (seconds).
    """

    def __init__(
        self,
        plan: Epochs,
        file: IO[str] | None = None,
        live: bool | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._clock = plan, clock
        self._file, screen = open_screen(file, live)
        self._display: _Bars | _Lines = _Lines(self._file) if screen is None else _Bars(screen)
        self._start(0)

    def _start(self, step: int) -> None:
        self._step = self._epoch_start_step = step
        self._start_secs = self._drawn_secs = self._clock()
        self._open_epoch: int | None = None  # index of the epoch that is displayed
        self._values: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Stores the metrics of an epoch. The last ones of an epoch complete its line."""
        prefix = "val_" if run == "eval" else ""
        if not prefix:
            self._progress(step)
        metrics = {f"{prefix}{name}": values[name] for name in sorted(values) if is_metric_of_keras(name)}
        epoch = self._plan.ended_by(step)
        if prefix and epoch is not None and epoch != self._open_epoch:
            if self._plan.is_evaluated(epoch):  # of an epoch before a resume
                self._display.print(Text(" - ".join([self._title(epoch), *_metric_texts(metrics)])))
            return
        self._values.update(metrics)
        if epoch is not None and (prefix or not self._plan.is_evaluated(epoch)):
            self._complete_epoch()

    def note(self, event: Event) -> None:
        """Prints the start, the progress or the end of a run."""
        if isinstance(event, Started):
            self._complete_epoch()
            self._start(event.step)
            self._display.print(run_header(event))
            if event.total_steps is None or event.step < event.total_steps:
                self._show_epoch(event.step)
        elif type(event) is Progressed:
            self._progress(event.step)
        elif isinstance(event, Ended):
            self._complete_epoch()
            self._display.print(run_footer(event))

    def _progress(self, step: int) -> None:
        if self._values and step > self._step:  # an evaluation that has not followed
            self._complete_epoch()
        if step > self._step:
            self._show_epoch(step - 1)
            self._step = step
        time_secs = self._clock()
        if self._open_epoch is not None and time_secs - self._drawn_secs >= _REDRAW_SECS:
            self._drawn_secs = time_secs
            self._display.update(self._steps_in_epoch(), self._speed())

    def _show_epoch(self, step: int) -> None:
        """Prints `Epoch 2/5` for the epoch of the step after `step`, if it is not displayed."""
        epoch = self._plan.first + step // self._plan.steps
        if epoch == self._open_epoch:
            return
        self._open_epoch = epoch
        self._display.open_epoch(self._title(epoch), self._plan.steps)
        self._display.update(step % self._plan.steps, "")

    def _complete_epoch(self) -> None:
        """Prints the metrics of the displayed epoch."""
        if self._open_epoch is None:
            return
        self._display.complete_epoch(self._steps_in_epoch(), self._speed(), _metric_texts(self._values))
        self._open_epoch, self._values = None, {}
        self._epoch_start_step, self._start_secs = self._step, self._clock()

    def _steps_in_epoch(self) -> int:
        """Returns the number of completed steps of the displayed epoch."""
        assert self._open_epoch is not None
        return self._step - (self._open_epoch - self._plan.first) * self._plan.steps

    def _title(self, epoch: int) -> str:
        return f"Epoch {epoch + 1}/{self._plan.end}"

    def _speed(self) -> str:
        """Returns `1s - 31ms/step`."""
        secs, steps = self._clock() - self._start_secs, self._step - self._epoch_start_step
        duration = f"{secs:.0f}s" if secs < 60 else format_duration(secs)
        return f"{duration} - {_per_step(secs / steps)}" if steps > 0 else duration


class _Lines:
    """Display of epochs in lines, for log files."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def print(self, block: RenderableType) -> None:
        """Prints a block of text."""
        for line in text_lines(block):
            self._file.write(encodable(line, self._file) + "\n")
        self._file.flush()

    def open_epoch(self, title: str, num_steps: int) -> None:
        """Prints the title of an epoch with this number of steps."""
        self._num_steps = num_steps
        self.print(Text(title))

    def update(self, steps: int, speed: str) -> None:
        """Does not print the progress."""

    def complete_epoch(self, steps: int, speed: str, texts: list[str]) -> None:
        """Prints the line of the epoch."""
        self.print(Text(" - ".join([f"{steps}/{self._num_steps}", speed, *texts])))


class _Bars:
    """Display of epochs as bars on a terminal or in a notebook."""

    def __init__(self, screen: "TerminalScreen | NotebookScreen") -> None:
        self._screen = screen
        self._bar: Progress | None = None

    def print(self, block: RenderableType) -> None:
        """Prints a block of text."""
        self._screen.print(block)

    def open_epoch(self, title: str, num_steps: int) -> None:
        """Prints the title of an epoch with this number of steps, and opens its bar."""
        # Imported here, as it takes time.
        from rich.progress import BarColumn, Progress, TextColumn

        self._screen.print(Text(title))
        bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
            BarColumn(_BAR_COLUMNS, complete_style="green", finished_style="green"),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(overflow="fold")),
            console=self._screen.console,
            auto_refresh=False,  # a thread would take time from the steps
        )
        bar.add_task("", total=num_steps, text="")
        self._bar = bar
        self._screen.open(bar)

    def update(self, steps: int, speed: str) -> None:
        """Draws the progress."""
        self._draw(steps, speed.replace(" - ", " "))

    def complete_epoch(self, steps: int, speed: str, texts: list[str]) -> None:
        """Draws the bar with the metrics, and leaves it on the screen."""
        self._draw(steps, " - ".join([speed.replace(" - ", " "), *texts]))
        self._screen.close()
        self._bar = None

    def _draw(self, steps: int, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=steps, text=text)
            self._screen.refresh()


def _metric_texts(values: Mapping[str, float]) -> list[str]:
    return [f"{name}: {format_number(value)}" for name, value in values.items()]


def _per_step(secs: float) -> str:
    """Returns a time with three digits: 31ms/step, 1.25s/step, 850us/step."""
    if secs >= 1:
        return f"{secs:.3g}s/step"
    return f"{secs * 1e3:.3g}ms/step" if secs >= 1e-3 else f"{secs * 1e6:.3g}us/step"
