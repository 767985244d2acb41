"""Result of one call of `Trainer.train`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RunResult:
    """Metrics and speed of a run.

    Attributes:
      means: Means of the newest log interval.
      metrics: Metrics of the newest evaluation; empty if there was none.
      best_step: Step of the weights that were restored at the end, or None.
      sentences: Sentences about the end for the user.
      rates: (steps, seconds) of each log interval, training alone.
    """

    means: Mapping[str, float]
    metrics: Mapping[str, float]
    best_step: int | None
    sentences: tuple[str, ...]
    rates: tuple[tuple[int, float], ...]

    def values(self) -> dict[str, float]:
        """Returns the means, the metrics as "eval_<name>", and `best_step` if weights were restored."""
        metrics = {f"eval_{name}": value for name, value in self.metrics.items()}
        best = {} if self.best_step is None else {"best_step": self.best_step}
        return {**self.means, **metrics, **best}

    @property
    def steps_per_sec(self) -> float | None:
        """Speed of the run, or None if no interval was timed."""
        secs = sum(interval_secs for _, interval_secs in self.rates)
        return sum(steps for steps, _ in self.rates) / secs if secs else None
