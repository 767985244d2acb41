"""Warns of a loss that jumps, and goes back to the newest checkpoint if it is asked to.

def build(self):
    ...
    self.spike = ctl.LossSpike(factor=3.0, window=10, rollback=True)
"""

import math
import numbers
import statistics
from collections.abc import Mapping
from typing import Any

from ctl.callbacks.watchers import Verdict
from ctl.errors import UsageError

_ENOUGH = 3  # values, before anything is called a spike


class LossSpike:
    """Compares each logged value of a metric with the median of those before it.

    >>> spike = LossSpike(factor=3.0, window=10)
    >>> [spike.saw(i, {"loss": x}, "train").warning != "" for i, x in enumerate([1, 1.1, 0.9, 1, 7])]
    [False, False, False, False, True]
    """

    def __init__(
        self, metric: str = "loss", *, factor: float = 3.0, window: int = 10, rollback: bool = False
    ):
        """Keeps and checks.

        Args:
          metric: a number of the training, as logged; smaller is better.
          factor: a value that is so many times the median is a spike; one of a negative median, when it
            lies as far above it.
          window: of so many values, at the logging interval.
          rollback: go back to the newest checkpoint, and on with the data that come next.
        """
        if not (isinstance(factor, numbers.Real) and factor > 1):
            raise UsageError(f"LossSpike factor is {factor!r}; expected a number > 1.")
        if isinstance(window, bool) or not isinstance(window, int) or window < _ENOUGH:
            raise UsageError(f"LossSpike window is {window!r}; expected a whole number >= {_ENOUGH}.")
        self.metric: str = metric
        self.rollback: bool = rollback
        self._factor: float = float(factor)
        self._window: int = window
        self.state: dict[str, Any] = {"values": []}

    def saw(self, step: int, values: Mapping[str, float], run: str) -> Verdict:
        """Takes note of the values of `run`; a spike itself is not kept."""
        value = values.get(self.metric, math.nan)
        if run != "train" or not math.isfinite(value):
            return Verdict()
        seen = self.state["values"]
        middle = statistics.median(seen) if len(seen) >= _ENOUGH else math.inf
        if value - middle > (self._factor - 1.0) * abs(middle):
            text = f"{self.metric} jumped to {value:.4g} from a median of {middle:.4g}"
            return Verdict(warning=text, roll_back=self.rollback)
        self.state = {"values": [*seen, value][-self._window :]}
        return Verdict()
