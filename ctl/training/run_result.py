"""Result of one call of `Trainer.train`."""

from collections.abc import Mapping
from dataclasses import dataclass

from ctl.callbacks.best_value import BestRecord
from ctl.metrics.protocol import RunEnd
from ctl.metrics.results import Results


@dataclass(frozen=True)
class RunResult:
    """Metrics and speed of a run.

    Attributes:
      means: Means of the newest log interval.
      metrics: Metrics of the newest evaluation; empty if there was none.
      best: Step and metrics of the best value, or None.
      is_restored: True if the model has the weights of that step.
      sentences: Sentences about the end for the user.
      rates: (steps, seconds) of each log interval, training alone.
    """

    means: Mapping[str, float]
    metrics: Mapping[str, float]
    best: BestRecord | None
    is_restored: bool
    sentences: tuple[str, ...]
    rates: tuple[tuple[int, float], ...]

    def results(self, end: RunEnd) -> Results:
        """Returns the means, the metrics as "eval_<name>", and `best_step` if weights were restored."""
        metrics = {f"eval_{name}": value for name, value in self.metrics.items()}
        if self.best is None:
            return Results({**self.means, **metrics}, end)
        restored = {"best_step": self.best.step} if self.is_restored else {}
        best_metrics = self.best.result_metrics()
        return Results({**self.means, **metrics, **restored}, end, self.best.step, best_metrics)

    @property
    def steps_per_sec(self) -> float | None:
        """Speed of the run, or None if no interval was timed."""
        secs = sum(interval_secs for _, interval_secs in self.rates)
        return sum(steps for steps, _ in self.rates) / secs if secs else None
