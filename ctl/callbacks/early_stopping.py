"""Early stopping."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ctl.callbacks.best_value import BestValue
from ctl.callbacks.keras_names import refuse_keras_names
from ctl.callbacks.protocol import Callback, Decision
from ctl.setting_values import check_fields, check_integer


@refuse_keras_names
@dataclass(eq=False)
class EarlyStopping(Callback):
    """Callback that stops the run when a metric has not improved for `patience` consecutive values.

    It is modelled on `keras.callbacks.EarlyStopping`.

    Attributes:
      metric: Name of the metric. A metric of the evaluation may have the prefix "val_".
      patience: Number of consecutive values without improvement that stops the run. 0 is the same as 1.
      min_delta: Minimum difference of an improvement.
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
      baseline: Value that an improvement must be better than, or None.
      start_from: Number of first values to ignore.
      restore_best: True to restore the best weights at the end of the run.
      run: "eval" or "train".
      stopped_at: Step at which the callback has stopped the run, or None.
      best_step: Step of the best value, or None.
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
        check_fields(self)
        check_integer("patience", self.patience, 0)
        self.best: BestValue = BestValue(self.metric, self.run, self.mode, self.min_delta)
        self.monitored: BestValue | None = self.best
        self._num_values = self._waited = 0
        self.stopped_at: int | None = None
        self.best_step: int | None = None

    @property
    def state(self) -> dict[str, Any]:
        """Best value and its step, numbers of values, and step of the stop."""
        return {
            "best": self.best.value,
            "waited": self._waited,
            "seen": self._num_values,
            "stopped_at": self.stopped_at,
            "best_step": self.best_step,
            "record": self.best.saved_record(),
        }

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self.best.restore(saved["best"], saved.get("record"))
        self._waited = saved["waited"]
        self._num_values, self.stopped_at = saved["seen"], saved["stopped_at"]
        self.best_step = saved["best_step"]

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Compares the metric with its best value. Stops after `patience` values without progress."""
        value = self.best.of(values, run)
        if value is None:
            return None
        self._num_values += 1
        if self._num_values <= self.start_from:
            return None
        is_better = self.best.note(value, step, values)
        self._waited += 1
        if is_better:
            self.best_step = step
            if self.baseline is None or self.best.beats(value, self.baseline):
                self._waited = 0
        if not is_better and self._waited >= max(1, self.patience):
            self.stopped_at = step
            return Decision(stop=True, message=self._reason())
        return Decision(keep_weights=self.restore_best and is_better)

    def _reason(self) -> str:
        noun = "evaluation" if self.best.run == "eval" else "log interval"
        count = f"{self._waited} {noun}{'' if self._waited == 1 else 's'}"
        reason = f"{self.best.run} {self.best.metric} has not improved for {count}"
        if self.best_step is None:
            return reason
        return f"{reason}; best {self.best.value:.4g} at step {self.best_step}"
