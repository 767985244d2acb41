"""Writes the model whenever a metric is better than before."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ctl.callbacks.best_value import BestValue
from ctl.callbacks.keras_names import refuse_keras_names
from ctl.callbacks.protocol import Callback, Decision


@refuse_keras_names
@dataclass(eq=False)
class SaveBest(Callback):
    """Writes the model whenever a metric is better than ever before.

    Attributes:
      metric: name of a number; those of the evaluation may be written "val_<name>" too.
      directory: where to; by default `model_dir/best`.
      formats: of "keras", "saved_model", "weights".
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
      run: "eval" or "train".

    Modelled on `keras.callbacks.ModelCheckpoint` with `save_best_only=True`.
    """

    metric: str
    _: KW_ONLY
    directory: str | None = None
    formats: Sequence[str] = ("keras",)
    mode: str = "auto"
    run: str = "eval"

    name = "save_best"

    def __post_init__(self) -> None:
        self.best = self.monitored = BestValue(self.metric, self.run, self.mode, 0.0)
        self.formats = (self.formats,) if isinstance(self.formats, str) else tuple(self.formats)

    @property
    def state(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best.value}

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self.best.value = saved["best"]

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        value = self.best.of(values, run)
        if value is None or not self.best.note(value):
            return None
        return Decision(export=self.formats, directory=self.directory)
