"""Progress bar of rich with a line of metrics below it, and permanent lines around them."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from ctl.callbacks.schedule import EpochLength
from ctl.metrics.console_screens import NotebookScreen, TerminalScreen
from ctl.metrics.console_text import (
    epoch_text,
    format_duration,
    format_rate,
    metric_texts,
    rate_texts,
    run_footer,
    run_header,
    setting_texts,
)
from ctl.metrics.pace import Pace
from ctl.metrics.protocol import Ended, Event, Progressed, Saved, Started, Traced
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

_MIN_BAR_COLUMNS, _MAX_BAR_COLUMNS = 10, 40
_LABEL = "train"
_GAP = "  "
_Items = Sequence[tuple[int, Text]]  # (priority, text), where small priorities are shown first


class LiveConsole:
    """Console output with a progress bar. Redraws on the caller's thread, at most every 0.1 seconds."""

    def __init__(self, screen: TerminalScreen | NotebookScreen, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._clock = clock
        self._pace = Pace(clock)  # rich's estimate of the speed includes loops that compile
        self._bar: _TrainProgress | None = None
        self._values: dict[str, float] = {}
        self._saved_step: int | None = None
        self._compiles_until: int | None = None  # completed steps, until a loop follows them
        self._epoch_length: EpochLength | None = None
        self._has_ended = False

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Shows training metrics in the bar, and prints those of an evaluation."""
        if run == "train":
            self._values.update(values)
            if self._bar is not None:
                self._progress(step)
                return
        else:
            self._pace.note_evaluation()
        self._screen.print(Text(_GAP.join([f"{run} step {step}", *metric_texts(values)])))

    def note(self, event: Event) -> None:
        """Updates the bar, or prints the start or end of a run."""
        if type(event) is Progressed:
            self._progress(event.step)
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, EpochLength):
            self._epoch_length = event
        elif isinstance(event, Traced):
            self._pace.exclude_loop()
        elif isinstance(event, Saved):
            self._saved_step = event.step
            self._progress(self._pace.step)
        elif isinstance(event, Ended) and not self._has_ended:
            self._has_ended = True
            self._stop()
            self._screen.print(run_footer(event))

    def _start(self, event: Started) -> None:
        self._stop()
        self._pace = Pace(self._clock, event.step, event.total_steps)
        self._values, self._saved_step, self._epoch_length, self._has_ended = {}, None, None, False
        self._compiles_until = event.step if event.compiles else None
        self._screen.print(run_header(event))
        self._bar = _TrainProgress(self._screen.console, self._clock, event.total_steps)
        self._update(self._bar)
        self._screen.open(self._bar)

    def _stop(self) -> None:
        self._compiles_until = None
        if self._bar is not None:
            self._update(self._bar)
        self._bar = None
        self._screen.close()

    def _progress(self, step: int) -> None:
        is_due = self._pace.tick(step)
        if self._compiles_until is not None and step > self._compiles_until:
            self._compiles_until, is_due = None, True
        if is_due and self._bar is not None:
            self._update(self._bar)
            self._screen.refresh()

    def _update(self, bar: "_TrainProgress") -> None:
        items, metrics = self._items(), self._metric_items()
        bar.update(bar.task_ids[0], completed=self._pace.step, items=items, metrics=metrics)

    def _items(self) -> _Items:
        """Returns `200/500  epoch 2/5  412 steps/s  52.7k examples/s  0:12  eta 0:01`."""
        pace = self._pace
        position = Text(
            f"step {pace.step}" if pace.total_steps is None else f"{pace.step}/{pace.total_steps}"
        )
        if self._compiles_until is not None:
            return [(0, position), (1, Text("compiling…", style="cyan"))]
        rates = rate_texts(self._values)
        if "steps_per_sec" not in self._values and pace.steps_per_sec is not None:
            rates.insert(0, f"{format_rate(pace.steps_per_sec)} steps/s")
        epochs = epoch_text(self._epoch_length, pace.step, pace.total_steps)
        items = [(0, position), *((2, Text(epoch)) for epoch in epochs)]
        items += [(3 + i, Text(rate)) for i, rate in enumerate(rates)]
        items.append((5, Text(format_duration(pace.elapsed_secs))))
        if pace.total_steps is not None:
            items.append((1, Text(f"eta {format_duration(pace.eta_secs)}", style="cyan")))
        return items

    def _metric_items(self) -> _Items:
        items = [(2 if i else 0, Text(text)) for i, text in enumerate(metric_texts(self._values))]
        if self._saved_step is not None:
            items.append((1, Text(f"✓ saved step {self._saved_step}", style="green")))
        return items + [(3, Text(text, style="dim")) for text in setting_texts(self._values)]


class _TrainProgress(Progress):
    """Bar of one task with the fields `items`, which are beside the bar, and `metrics`, which are below."""

    def __init__(self, console: Console, clock: Callable[[], float], total_steps: int | None) -> None:
        is_stdout = console.file is sys.stdout  # then print() writes above the bar
        table_column = Column(min_width=_MIN_BAR_COLUMNS, max_width=_MAX_BAR_COLUMNS)
        bar = BarColumn(None, complete_style="green", finished_style="green", table_column=table_column)
        super().__init__(
            TextColumn(_LABEL, style="bold"),
            *([bar] if total_steps else []),
            _ItemsColumn(console),
            console=console,
            auto_refresh=False,  # a thread would take time from the steps
            redirect_stdout=is_stdout,
            redirect_stderr=is_stdout and sys.stderr.isatty(),
            get_time=clock,
        )
        self.add_task(_LABEL, total=total_steps, items=[], metrics=[])

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        for task in self.tasks:
            yield _fitting_line(task.fields["metrics"], self.console.width)


class _ItemsColumn(ProgressColumn):
    """Column with the items that fit beside a bar of minimum width."""

    def __init__(self, console: Console) -> None:
        super().__init__(Column(no_wrap=True))
        self._console = console

    def render(self, task: Task) -> Text:
        width = self._console.width - len(_LABEL) - _MIN_BAR_COLUMNS - 2
        return _fitting_line(task.fields["items"], width)


def _fitting_line(items: _Items, width: int) -> Text:
    """Returns a line of the items that fit into `width` columns, at least of one, in the given order."""
    chosen: set[int] = set()
    free_columns = width
    for index in sorted(range(len(items)), key=lambda i: items[i][0]):
        num_columns = items[index][1].cell_len + (len(_GAP) if chosen else 0)
        if num_columns <= free_columns or not chosen:
            chosen.add(index)
            free_columns -= num_columns
    line = Text(_GAP, no_wrap=True, overflow="ellipsis")
    return line.join(text for i, (_, text) in enumerate(items) if i in chosen)
