"""One line per thing that happened, for log files."""

from collections.abc import Callable, Mapping
from typing import IO

from ctl.metrics.console_screens import text_lines
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
from rich.console import RenderableType


class PlainConsole:
    """Writes whole lines to `file` and flushes each; characters it cannot encode are escaped."""

    def __init__(self, file: IO[str], clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        self._pace = Pace(clock)
        self._ended = False

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        if run != "train":
            self._pace.evaluated()
            self._line(
                "  ".join(
                    [
                        f"{run} step {step}",
                        *metric_words(values),
                        *rate_words(values),
                        *setting_words(values),
                    ]
                )
            )
            return
        self._pace.tick(step)
        total, rates = self._pace.total_steps, rate_words(values)
        if "steps_per_sec" not in values and self._pace.steps_per_sec is not None:
            rates.insert(0, f"{short_rate(self._pace.steps_per_sec)} steps/s")
        words = [f"step {step}" if total is None else f"step {step}/{total}"]
        words += [*metric_words(values), *setting_words(values), *rates]
        if self._pace.eta_secs is not None:
            words.append(f"eta {duration(self._pace.eta_secs)}")
        self._line("  ".join(words))

    def note(self, event: Event) -> None:
        if type(event) is Progressed:
            self._pace.tick(event.step)
        elif isinstance(event, Started):
            self._pace = Pace(self._clock, event.step, event.total_steps)
            self._ended = False
            self._block(run_header(event))
        elif isinstance(event, Traced):
            self._pace.leave_out()
        elif isinstance(event, Saved):
            self._line(f"saved ckpt step {event.step}")
        elif isinstance(event, Ended) and not self._ended:
            self._ended = True
            self._block(farewell(event))

    def _block(self, block: RenderableType) -> None:
        self._line("\n".join(text_lines(block)))

    def _line(self, line: str) -> None:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        shown = line.encode(encoding, "backslashreplace").decode(encoding)
        self._file.write(shown + "\n")
        self._file.flush()
