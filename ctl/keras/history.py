"""Result of `ctl.fit`."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from ctl.keras.callbacks import is_metric_of_keras
from ctl.keras.data import Epochs
from ctl.metrics.console_text import format_number
from ctl.metrics.protocol import MetricWriter


class History(MetricWriter, keras.callbacks.History):
    """Metrics of each epoch: the `keras.callbacks.History` that `ctl.fit` returns.

    Every worker records the same values.

    Attributes:
      history: Name -> values, one per epoch.
      epoch: Numbers of the epochs.
    """

    everywhere = True

    def __init__(self, model: Any = None, params: Mapping[str, Any] | None = None):
        super().__init__()
        self.set_model(model)
        self.set_params(dict(params or {}))
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}
        self._plan: Epochs | None = None

    def starts(self, plan: Epochs) -> None:
        """Sets the epochs of the training."""
        self._plan = plan

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Records the metrics of an epoch or of its evaluation. Ignores other steps."""
        epoch = None if self._plan is None else self._plan.ended_by(step)
        if epoch is None or (run == "eval" and self._plan and not self._plan.is_evaluated(epoch)):
            return
        prefix = "val_" if run == "eval" else ""
        if not prefix and epoch not in self.epoch:
            self.epoch.append(epoch)
        for name, value in values.items():
            if is_metric_of_keras(name):
                self.history.setdefault(prefix + name, []).append(value)

    def take(self, epochs: Sequence[int], logs: Mapping[str, Sequence[float]]) -> None:
        """Adds the values of the callbacks' logs: of an incomplete epoch, or added by callbacks.

        Args:
          epochs: Numbers of the epochs.
          logs: Name -> values, one per epoch.
        """
        self.epoch = [*self.epoch, *(e for e in epochs if e not in self.epoch)]
        for name, values in logs.items():
            if len(values) > len(self.history.get(name, ())):
                self.history[name] = list(values)

    def __repr__(self) -> str:
        newest = ", ".join(f"{name} {format_number(v[-1])}" for name, v in self.history.items() if v)
        epochs = f"{len(self.epoch)} epoch{'' if len(self.epoch) == 1 else 's'}"
        return f"History({epochs}{': ' if newest else ''}{newest})"
