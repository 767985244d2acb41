"""Warns of a loss that jumps, and goes back to the newest checkpoint if it is asked to."""

import math
import numbers
import statistics
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ctl.callbacks.best_value import check_count
from ctl.callbacks.keras_names import refuse_keras_names
from ctl.callbacks.protocol import Callback, Decision
from ctl.errors import UsageError

_ENOUGH = 3  # values, before anything is called a spike


@refuse_keras_names
@dataclass(eq=False)
class LossSpike(Callback):
    """Compares each logged value of a metric with the median of those before it.

    Attributes:
      metric: a number of the training, as logged; smaller is better.
      factor: a value that is so many times the median is a spike; one of a negative median, when it
        lies as far above it.
      window: of so many values, at the logging interval.
      rollback: go back to the newest checkpoint, and on with the data that come next.

    >>> spike = LossSpike(factor=3.0, window=10)
    >>> [bool(spike.on_metrics(i, {"loss": x}, "train")) for i, x in enumerate([1, 1.1, 0.9, 1, 7])]
    [False, False, False, False, True]
    """

    metric: str = "loss"
    _: KW_ONLY
    factor: float = 3.0
    window: int = 10
    rollback: bool = False

    name = "spike"

    def __post_init__(self) -> None:
        if not (isinstance(self.factor, numbers.Real) and self.factor > 1):
            raise UsageError(f"LossSpike factor is {self.factor!r}; expected a number > 1.")
        check_count("LossSpike window", self.window, _ENOUGH)
        self.state: dict[str, Any] = {"values": []}

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Takes note of the values of `run`; a spike itself is not kept."""
        value = values.get(self.metric, math.nan)
        if run != "train" or not math.isfinite(value):
            return None
        seen = self.state["values"]
        middle = statistics.median(seen) if len(seen) >= _ENOUGH else math.inf
        if value - middle > (self.factor - 1.0) * abs(middle):
            text = f"{self.metric} jumped to {value:.4g} from a median of {middle:.4g}"
            return Decision(message=text, roll_back=self.rollback)
        self.state = {"values": [*seen, value][-self.window :]}
        return None
