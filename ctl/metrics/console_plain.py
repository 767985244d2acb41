"""Console output in plain lines, for log files."""

from collections.abc import Callable, Mapping
from typing import IO

from ctl.callbacks.schedule import EpochLength
from ctl.metrics.console_text import (
    encodable,
    epoch_text,
    format_duration,
    format_rate,
    metric_texts,
    rate_texts,
    run_footer,
    run_header,
    setting_texts,
    text_lines,
)
from ctl.metrics.pace import Pace
from ctl.metrics.protocol import Ended, Event, Progressed, Saved, Started, Traced
from rich.console import RenderableType


class PlainConsole:
    """Console output of one line per event. Characters that the file cannot encode are escaped."""

    def __init__(self, file: IO[str], clock: Callable[[], float]) -> None:
        self._file = file
        self._clock = clock
        self._pace = Pace(clock)
        self._epoch_length: EpochLength | None = None
        self._has_ended = False

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Prints a line of metrics. Training metrics are printed at a limited rate."""
        if run != "train":
            self._pace.note_evaluation()
            texts = [*metric_texts(values), *rate_texts(values), *setting_texts(values)]
            self._line("  ".join([f"{run} step {step}", *texts]))
            return
        self._pace.tick(step)
        total, rates = self._pace.total_steps, rate_texts(values)
        if "steps_per_sec" not in values and self._pace.steps_per_sec is not None:
            rates.insert(0, f"{format_rate(self._pace.steps_per_sec)} steps/s")
        texts = [f"step {step}" if total is None else f"step {step}/{total}"]
        texts += epoch_text(self._epoch_length, step, total)
        texts += [*metric_texts(values), *setting_texts(values), *rates]
        if self._pace.eta_secs is not None:
            texts.append(f"eta {format_duration(self._pace.eta_secs)}")
        self._line("  ".join(texts))

    def note(self, event: Event) -> None:
        """Prints the start or end of a run."""
        if type(event) is Progressed:
            self._pace.tick(event.step)
        elif isinstance(event, Started):
            self._pace = Pace(self._clock, event.step, event.total_steps)
            self._has_ended, self._epoch_length = False, None
            self._block(run_header(event))
        elif isinstance(event, EpochLength):
            self._epoch_length = event
        elif isinstance(event, Traced):
            self._pace.exclude_loop()
        elif isinstance(event, Saved):
            self._line(f"saved ckpt step {event.step}")
        elif isinstance(event, Ended) and not self._has_ended:
            self._has_ended = True
            self._block(run_footer(event))

    def _block(self, block: RenderableType) -> None:
        self._line("\n".join(text_lines(block)))

    def _line(self, line: str) -> None:
        self._file.write(encodable(line, self._file) + "\n")
        self._file.flush()
