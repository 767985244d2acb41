"""Two lines with a bar that follow training; what stays is printed around them."""

from collections.abc import Callable, Mapping, Sequence

from ctl.metrics.console_screens import Screen
from ctl.metrics.console_text import (
    duration,
    farewell,
    metric_words,
    rate_words,
    run_header,
    setting_words,
    short_rate,
)
from ctl.metrics.pace import Pace
from ctl.metrics.protocol import Ended, Event, Progressed, Saved, Started, Traced
from rich.text import Text

_BAR_COLUMNS = (10, 40)  # at least, at most
_GAP = "  "


class LiveConsole:
    """Redraws when told of something, at most every 0.1 s, on the caller's thread."""

    def __init__(self, screen: Screen, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._clock = clock
        self._pace = Pace(clock)
        self._values: dict[str, float] = {}
        self._saved_step: int | None = None
        self._compiles_until: int | None = None  # more than so many steps are complete
        self._runs = self._ended = False

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        if run == "train":
            self._values.update(values)
            if self._runs:
                self._progress(step)
                return
        else:
            self._pace.evaluated()
        self._screen.print(Text(_GAP.join([f"{run} step {step}", *metric_words(values)])))

    def note(self, event: Event) -> None:
        if type(event) is Progressed:
            self._progress(event.step)
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Traced):
            self._pace.leave_out()
        elif isinstance(event, Saved):
            self._saved_step = event.step
            self._progress(self._pace.step)
        elif isinstance(event, Ended) and not self._ended:
            self._ended = True
            self._stop()
            self._screen.print(farewell(event))

    def _start(self, event: Started) -> None:
        self._stop()
        self._pace = Pace(self._clock, event.step, event.total_steps)
        self._values, self._saved_step, self._ended = {}, None, False
        self._compiles_until = event.step if event.compiles else None
        self._screen.print(run_header(event))
        self._runs = True
        self._screen.open(self._draw)

    def _stop(self) -> None:
        self._runs, self._compiles_until = False, None
        self._screen.close()

    def _progress(self, step: int) -> None:
        due = self._pace.tick(step)
        if self._compiles_until is not None and step > self._compiles_until:
            self._compiles_until, due = None, True
        if due:
            self._screen.refresh()

    def _draw(self) -> Text:
        width, compiles = self._screen.width, self._compiles_until is not None
        lines = [_bar_line(self._pace, self._values, width, compiles), self._newest_line(width)]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)

    def _newest_line(self, width: int) -> Text:
        metrics = metric_words(self._values)
        words = [(2 if i else 0, Text(word)) for i, word in enumerate(metrics)]
        if self._saved_step is not None:
            words.append((1, Text(f"✓ saved step {self._saved_step}", style="green")))
        words += [(3, Text(word, style="dim")) for word in setting_words(self._values)]
        return Text(_GAP).join(_fitting(words, width))


def _bar_line(pace: Pace, values: Mapping[str, float], width: int, compiles: bool) -> Text:
    """`train ━━━━━───── 200/500  412 steps/s  52.7k examples/s  0:12  eta 0:01`"""
    total = pace.total_steps
    counted = f"step {pace.step}" if total is None else f"{pace.step}/{total}"
    rates = rate_words(values)
    if "steps_per_sec" not in values and pace.steps_per_sec is not None:
        rates.insert(0, f"{short_rate(pace.steps_per_sec)} steps/s")
    words = [(0, Text(counted)), *((2 + i, Text(rate)) for i, rate in enumerate(rates))]
    words.append((4, Text(duration(pace.elapsed_secs))))
    if compiles:
        words = [words[0], (1, Text("compiling…", style="cyan"))]
    elif total is not None:
        words.append((1, Text(f"eta {duration(pace.eta_secs)}", style="cyan")))
    line = Text("train ", style="bold")
    if total:
        shown = Text(_GAP).join(_fitting(words, width - len(line) - _BAR_COLUMNS[0] - 1))
        room = width - len(line) - shown.cell_len - 1
        columns = min(_BAR_COLUMNS[1], max(_BAR_COLUMNS[0], room))
        done = min(columns, columns * pace.step // total)
        bar = (("━" * done, "green"), ("─" * (columns - done), "dim"))
        return Text.assemble(line, *bar, " ", shown)
    return Text.assemble(line, Text(_GAP).join(_fitting(words, width - len(line))))


def _fitting(words: Sequence[tuple[int, Text]], width: int) -> list[Text]:
    """The words that fit side by side, the least number first; the first one always stays."""
    chosen: set[int] = set()
    room = width
    for index in sorted(range(len(words)), key=lambda i: words[i][0]):
        needed = words[index][1].cell_len + (len(_GAP) if chosen else 0)
        if needed <= room or not chosen:
            chosen.add(index)
            room -= needed
    return [word for i, (_, word) in enumerate(words) if i in chosen]
