"""Two lines at the foot of the terminal that follow training; what stays is printed above them."""

import atexit
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

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
from ctl.metrics.protocol import Ended, Event, Progressed, Saved, Started
from rich.console import Console
from rich.live import Live
from rich.text import Text

_BAR_COLUMNS = (10, 40)  # at least, at most
_GAP = "  "


class LiveConsole:
    """Redraws when told of something, at most every 0.1 s, on the caller's thread."""

    def __init__(self, file: IO[str], clock: Callable[[], float]) -> None:
        self._console = _TerminalConsole(
            file=file, force_terminal=True, markup=False, emoji=False, highlight=False
        )
        self._clock = clock
        self._pace = Pace(clock)
        self._values: dict[str, float] = {}
        self._saved_step: int | None = None
        self._live: Live | None = None
        self._ended = False

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        if run == "train":
            self._values.update(values)
            if self._live is not None:
                self._progress(step)
                return
        words = [f"{run} step {step}", *metric_words(values)]
        self._console.print(Text(_GAP.join(words)), soft_wrap=True)

    def note(self, event: Event) -> None:
        if type(event) is Progressed:
            self._progress(event.step)
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Saved):
            self._saved_step = event.step
            self._progress(self._pace.step)
        elif isinstance(event, Ended) and not self._ended:
            self._ended = True
            self._stop()
            self._console.print(farewell(event))

    def _start(self, event: Started) -> None:
        self._stop()
        self._pace = Pace(self._clock, event.step, event.total_steps)
        self._values, self._saved_step, self._ended = {}, None, False
        self._console.print(run_header(event))
        ours = self._console.file is sys.stdout  # then print() goes above the bar
        self._live = live = Live(
            console=self._console,
            get_renderable=self._draw,
            auto_refresh=False,
            redirect_stdout=ours,
            redirect_stderr=ours and sys.stderr.isatty(),
        )
        atexit.register(self._restore)
        live.start(refresh=True)

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self._restore)
            live.stop()  # draws the newest state once more

    def _restore(self) -> None:
        """At exit without `Ended`: the cursor comes back."""
        with contextlib.suppress(Exception):
            self._stop()

    def _progress(self, step: int) -> None:
        if self._pace.tick(step) and self._live is not None:
            self._live.refresh()

    def _draw(self) -> Text:
        width = self._console.width
        lines = [_bar_line(self._pace, self._values, width), self._newest_line(width)]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)

    def _newest_line(self, width: int) -> Text:
        metrics = metric_words(self._values)
        words = [(2 if i else 0, Text(word)) for i, word in enumerate(metrics)]
        if self._saved_step is not None:
            words.append((1, Text(f"✓ saved step {self._saved_step}", style="green")))
        words += [(3, Text(word, style="dim")) for word in setting_words(self._values)]
        return Text(_GAP).join(_fitting(words, width))


def _bar_line(pace: Pace, values: Mapping[str, float], width: int) -> Text:
    """`train ━━━━━───── 200/500  412 steps/s  52.7k examples/s  0:12  eta 0:01`"""
    total = pace.total_steps
    counted = f"step {pace.step}" if total is None else f"{pace.step}/{total}"
    rates = rate_words(values)
    if "steps_per_sec" not in values and pace.steps_per_sec is not None:
        rates.insert(0, f"{short_rate(pace.steps_per_sec)} steps/s")
    words = [(0, Text(counted)), *((2 + i, Text(rate)) for i, rate in enumerate(rates))]
    words.append((4, Text(duration(pace.elapsed_secs))))
    if total is not None:
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


class _TerminalConsole(Console):
    """rich ends the process when the pipe breaks; here that is one more error of a writer."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the terminal that showed the progress is gone")
