"""Reduction of the learning rate on a plateau of a metric."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ctl.callbacks.best_value import BestValue
from ctl.callbacks.keras_names import refuse_keras_names
from ctl.callbacks.protocol import Callback, Decision
from ctl.errors import UsageError
from ctl.setting_values import check_fields, check_integer


@refuse_keras_names
@dataclass(eq=False)
class ReduceOnPlateau(Callback):
    """Callback that reduces the learning rate when a metric has not improved for `patience` values.

    It is modelled on `keras.callbacks.ReduceLROnPlateau`.

    Attributes:
      metric: Name of the metric. A metric of the evaluation may have the prefix "val_".
      factor: Factor of the learning rate, between 0 and 1.
      patience: Number of consecutive values without improvement that reduces the learning rate. 0 is
        the same as 1.
      cooldown: Number of values after a reduction that do not count as values without improvement.
      min_delta: Minimum difference of an improvement.
      min_learning_rate: Minimum of the learning rate.
      mode: "max", "min" or "auto".
      run: "eval" or "train".
    """

    metric: str
    _: KW_ONLY
    factor: float = 0.1
    patience: int = 10
    cooldown: int = 0
    min_delta: float = 1e-4
    min_learning_rate: float = 0.0
    mode: str = "auto"
    run: str = "eval"

    name = "plateau"

    def __post_init__(self) -> None:
        check_fields(self)
        check_integer("patience", self.patience, 0)
        check_integer("cooldown", self.cooldown, 0)
        if not 0 < self.factor < 1:
            raise UsageError(f"factor is {self.factor!r}; expected a number between 0 and 1.")
        self.best: BestValue = BestValue(self.metric, self.run, self.mode, self.min_delta)
        self.monitored: BestValue | None = self.best
        self._cooldown_left = self._waited = 0

    @property
    def state(self) -> dict[str, Any]:
        """Best value, number of values without improvement, and number of remaining cooldown values."""
        return {"best": self.best.value, "waited": self._waited, "cooling": self._cooldown_left}

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self.best.restore(saved["best"])
        self._waited = saved["waited"]
        self._cooldown_left = saved["cooling"]

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Compares the metric with its best value. Returns a lower learning rate on a plateau."""
        value = self.best.of(values, run)
        if value is None:
            return None
        if self._cooldown_left:
            self._cooldown_left -= 1
        if self.best.note(value):
            self._waited = 0
        elif not self._cooldown_left:
            self._waited += 1
        if self._waited < max(1, self.patience):
            return None
        self._waited, self._cooldown_left = 0, self.cooldown
        return Decision(learning_rate_factor=self.factor, lowest_learning_rate=self.min_learning_rate)
