"""The best value of one metric so far."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

from ctl.errors import UsageError

_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse")


def smaller_is_better(name: str, mode: str = "auto") -> bool:
    """What "min", "max" or, from the name of a metric, "auto" says."""
    return mode == "min" or (mode == "auto" and any(w in name.lower() for w in _SMALLER_IS_BETTER))


class BestValue:
    """The best value of one metric of one kind of run, "train" or "eval"."""

    def __init__(self, metric: str, run: str, mode: str, min_delta: float):
        if not isinstance(metric, str) or not metric:
            raise UsageError(f"metric is {metric!r}; expected the name of a number of the run.")
        if metric.startswith("val_"):  # as Keras calls those of an evaluation
            metric, run = metric.removeprefix("val_"), "eval"
        if run not in ("train", "eval"):
            raise UsageError(f"run is {run!r}; expected 'train' or 'eval'.")
        if mode not in ("auto", "min", "max"):
            raise UsageError(f"mode is {mode!r}; expected 'max', 'min' or 'auto'.")
        self.metric, self.run = metric, run
        self._sign = -1.0 if smaller_is_better(metric, mode) else 1.0
        self._min_delta = abs(min_delta)
        self.value: float | None = None

    def of(self, values: Mapping[str, float], run: str) -> float | None:
        """The value, if it is in `values` of this run; raises UsageError if it should be."""
        if run != self.run:
            return None
        if self.metric not in values:
            raise UsageError(
                f"a callback needs {self.metric!r}, but the {run} numbers are {', '.join(sorted(values))}. "
                "Write one of these."
            )
        return float(values[self.metric])

    def beats(self, value: float, other: float | None) -> bool:
        """NaN beats nothing; anything else beats None."""
        if math.isnan(value):
            return False
        return other is None or (value - other) * self._sign > self._min_delta

    def note(self, value: float) -> bool:
        """True for a new best, which is kept."""
        better = self.beats(value, self.value)
        if better:
            self.value = value
        return better


def check_count(name: str, value: Any, least: int) -> None:
    """Raises UsageError unless `value` is a whole number >= `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise UsageError(f"{name} is {value!r}; expected a whole number >= {least}.")
