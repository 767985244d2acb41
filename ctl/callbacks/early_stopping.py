"""Stops a run whose metric no longer improves."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ctl.callbacks.best_value import BestValue, check_count
from ctl.callbacks.keras_names import refuse_keras_names
from ctl.callbacks.protocol import Callback, Decision


@refuse_keras_names
@dataclass(eq=False)
class EarlyStopping(Callback):
    """Stops when a metric has not improved for `patience` values in a row.

    Attributes:
      metric: name of a number; those of the evaluation may be written "val_<name>" too.
      patience: values without improvement that are still accepted.
      min_delta: what counts as an improvement at least.
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
      baseline: a value to be beaten first, or None.
      start_from: values to ignore at the beginning.
      restore_best: give the model its best weights back at the end.
      run: "eval" or "train".
      stopped_at, best_step: steps, or None.

    Modelled on `keras.callbacks.EarlyStopping`.
    """

    metric: str
    _: KW_ONLY
    patience: int = 0
    min_delta: float = 0.0
    mode: str = "auto"
    baseline: float | None = None
    start_from: int = 0
    restore_best: bool = False
    run: str = "eval"

    name = "early_stopping"

    def __post_init__(self) -> None:
        check_count("patience", self.patience, 0)
        self.best = self.monitored = BestValue(self.metric, self.run, self.mode, self.min_delta)
        self._seen = self._waited = 0
        self.stopped_at = None
        self.best_step: int | None = None

    @property
    def state(self) -> dict[str, Any]:
        """Best value, its step, and for how many values it has stood."""
        return {
            "best": self.best.value,
            "waited": self._waited,
            "seen": self._seen,
            "stopped_at": self.stopped_at,
            "best_step": self.best_step,
        }

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self.best.value, self._waited = saved["best"], saved["waited"]
        self._seen, self.stopped_at = saved["seen"], saved["stopped_at"]
        self.best_step = saved["best_step"]

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        value = self.best.of(values, run)
        if value is None:
            return None
        self._seen += 1
        if self._seen <= self.start_from:
            return None
        better = self.best.note(value)
        self._waited += 1
        if better:
            self.best_step = step
            if self.baseline is None or self.best.beats(value, self.baseline):
                self._waited = 0
        if not better and self._waited >= max(1, self.patience):
            self.stopped_at = step
            return Decision(stop=True, message=self._reason())
        return Decision(keep_weights=self.restore_best and better)

    def _reason(self) -> str:
        noun = "evaluation" if self.best.run == "eval" else "log interval"
        count = f"{self._waited} {noun}{'' if self._waited == 1 else 's'}"
        reason = f"{self.best.run} {self.best.metric} has not improved for {count}"
        if self.best_step is None:
            return reason
        return f"{reason}; best {self.best.value:.4g} at step {self.best_step}"
