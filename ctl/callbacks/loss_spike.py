"""Detection of sudden increases of the loss."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ctl.callbacks.keras_names import refuse_keras_names
from ctl.callbacks.protocol import Callback, Decision
from ctl.errors import UsageError
from ctl.setting_values import check_fields, check_integer

_MIN_VALUES = 3  # a median of fewer values is not compared


@refuse_keras_names
@dataclass(eq=False)
class LossSpike(Callback):
    """Callback that compares each logged value of a metric with the median of the values before it.

    It logs a warning for a spike: a value v with v - median > (factor - 1) * |median|.

    Attributes:
      metric: Name of a metric of the training. Smaller values are better.
      factor: Multiple of the median, > 1, above which a value is a spike.
      window: Number of logged values in the median, >= 3.
      rollback: True to restore the newest checkpoint after a spike and to continue with later data.

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
        check_fields(self)
        if not self.factor > 1:
            raise UsageError(f"LossSpike factor is {self.factor!r}; expected a number > 1.")
        check_integer("LossSpike window", self.window, _MIN_VALUES)
        self.state: dict[str, Any] = {"values": []}

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Compares and stores a value. A spike is not stored."""
        value = values.get(self.metric, math.nan)
        if run != "train" or not math.isfinite(value):
            return None
        previous = self.state["values"]
        median = statistics.median(previous) if len(previous) >= _MIN_VALUES else math.inf
        if value - median > (self.factor - 1.0) * abs(median):
            text = f"{self.metric} jumped to {value:.4g} from a median of {median:.4g}"
            return Decision(message=text, roll_back=self.rollback)
        self.state = {"values": [*previous, value][-self.window :]}
        return None
