"""Progress bar: two lines that are redrawn, with permanent lines around them."""

from collections.abc import Callable, Mapping, Sequence

from ctl.metrics.console_screens import Screen
from ctl.metrics.console_text import (
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
from rich.text import Text

_MIN_BAR_COLUMNS, _MAX_BAR_COLUMNS = 10, 40
_GAP = "  "


class LiveConsole:
    """Console output with a progress bar. Redraws on the caller's thread, at most every 0.1 seconds."""

    def __init__(self, screen: Screen, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._clock = clock
        self._pace = Pace(clock)
        self._values: dict[str, float] = {}
        self._saved_step: int | None = None
        self._compiles_until: int | None = None  # completed steps, until a loop follows them
        self._is_running = self._has_ended = False

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        if run == "train":
            self._values.update(values)
            if self._is_running:
                self._progress(step)
                return
        else:
            self._pace.note_evaluation()
        self._screen.print(Text(_GAP.join([f"{run} step {step}", *metric_texts(values)])))

    def note(self, event: Event) -> None:
        if type(event) is Progressed:
            self._progress(event.step)
        elif isinstance(event, Started):
            self._start(event)
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
        self._values, self._saved_step, self._has_ended = {}, None, False
        self._compiles_until = event.step if event.compiles else None
        self._screen.print(run_header(event))
        self._is_running = True
        self._screen.open(self._draw)

    def _stop(self) -> None:
        self._is_running, self._compiles_until = False, None
        self._screen.close()

    def _progress(self, step: int) -> None:
        is_due = self._pace.tick(step)
        if self._compiles_until is not None and step > self._compiles_until:
            self._compiles_until, is_due = None, True
        if is_due:
            self._screen.refresh()

    def _draw(self) -> Text:
        width, is_compiling = self._screen.width, self._compiles_until is not None
        lines = [_bar_line(self._pace, self._values, width, is_compiling), self._metrics_line(width)]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)

    def _metrics_line(self, width: int) -> Text:
        items = [(2 if i else 0, Text(text)) for i, text in enumerate(metric_texts(self._values))]
        if self._saved_step is not None:
            items.append((1, Text(f"✓ saved step {self._saved_step}", style="green")))
        items += [(3, Text(text, style="dim")) for text in setting_texts(self._values)]
        return Text(_GAP).join(_fitting(items, width))


def _bar_line(pace: Pace, values: Mapping[str, float], width: int, is_compiling: bool) -> Text:
    """Returns `train ━━━━━───── 200/500  412 steps/s  52.7k examples/s  0:12  eta 0:01`."""
    total = pace.total_steps
    position = f"step {pace.step}" if total is None else f"{pace.step}/{total}"
    rates = rate_texts(values)
    if "steps_per_sec" not in values and pace.steps_per_sec is not None:
        rates.insert(0, f"{format_rate(pace.steps_per_sec)} steps/s")
    items = [(0, Text(position)), *((2 + i, Text(rate)) for i, rate in enumerate(rates))]
    items.append((4, Text(format_duration(pace.elapsed_secs))))
    if is_compiling:
        items = [items[0], (1, Text("compiling…", style="cyan"))]
    elif total is not None:
        items.append((1, Text(f"eta {format_duration(pace.eta_secs)}", style="cyan")))
    line = Text("train ", style="bold")
    if total:
        texts = Text(_GAP).join(_fitting(items, width - len(line) - _MIN_BAR_COLUMNS - 1))
        free_columns = width - len(line) - texts.cell_len - 1
        columns = min(_MAX_BAR_COLUMNS, max(_MIN_BAR_COLUMNS, free_columns))
        filled = min(columns, columns * pace.step // total)
        bar = (("━" * filled, "green"), ("─" * (columns - filled), "dim"))
        return Text.assemble(line, *bar, " ", texts)
    return Text.assemble(line, Text(_GAP).join(_fitting(items, width - len(line))))


def _fitting(items: Sequence[tuple[int, Text]], width: int) -> list[Text]:
    """Returns the texts of the items (priority, text) that fit in a line, at least one.

    Items with small priorities are chosen first. The texts keep the order of the items.
    """
    chosen: set[int] = set()
    free_columns = width
    for index in sorted(range(len(items)), key=lambda i: items[i][0]):
        num_columns = items[index][1].cell_len + (len(_GAP) if chosen else 0)
        if num_columns <= free_columns or not chosen:
            chosen.add(index)
            free_columns -= num_columns
    return [text for i, (_, text) in enumerate(items) if i in chosen]
