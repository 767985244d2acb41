"""Lowers the learning rate when a metric no longer improves."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ctl.callbacks.best_value import BestValue, check_count
from ctl.callbacks.keras_names import refuse_keras_names
from ctl.callbacks.protocol import Callback, Decision
from ctl.errors import UsageError


@refuse_keras_names
@dataclass(eq=False)
class ReduceOnPlateau(Callback):
    """Multiplies the learning rate by `factor` when a metric has not improved for `patience` values.

    Attributes:
      metric: name of a number; those of the evaluation may be written "val_<name>" too.
      factor: of the learning rate, between 0 and 1.
      patience: values without improvement that are still accepted.
      cooldown: values after a reduction in which none are counted.
      min_delta: what counts as an improvement at least.
      min_learning_rate: that it never goes below.
      mode: "max", "min", or "auto"; run: "eval" or "train".

    Modelled on `keras.callbacks.ReduceLROnPlateau`.
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
        check_count("patience", self.patience, 0)
        check_count("cooldown", self.cooldown, 0)
        if not 0 < self.factor < 1:
            raise UsageError(f"factor is {self.factor!r}; expected a number between 0 and 1.")
        self.best = self.monitored = BestValue(self.metric, self.run, self.mode, self.min_delta)
        self._cooling = self._waited = 0

    @property
    def state(self) -> dict[str, Any]:
        """Best value, for how many values it has stood, and how many are not to be counted yet."""
        return {"best": self.best.value, "waited": self._waited, "cooling": self._cooling}

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self.best.value, self._waited = saved["best"], saved["waited"]
        self._cooling = saved["cooling"]

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        value = self.best.of(values, run)
        if value is None:
            return None
        if self._cooling:
            self._cooling -= 1
        if self.best.note(value):
            self._waited = 0
        elif not self._cooling:
            self._waited += 1
        if self._waited < max(1, self.patience):
            return None
        self._waited, self._cooling = 0, self.cooldown
        return Decision(learning_rate_factor=self.factor, lowest_learning_rate=self.min_learning_rate)
