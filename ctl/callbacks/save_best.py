"""Export of the best model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ctl.callbacks.best_value import BestValue
from ctl.callbacks.keras_names import refuse_keras_names
from ctl.callbacks.protocol import Callback, Decision
from ctl.setting_values import check_fields, names_in


@refuse_keras_names
@dataclass(eq=False)
class SaveBest(Callback):
    """Callback that exports the model when a metric has a new best value.

    It is modelled on `keras.callbacks.ModelCheckpoint` with `save_best_only=True`.

    Attributes:
      metric: Name of the metric. A metric of the evaluation may have the prefix "val_".
      directory: Directory of the exported files. None: `model_dir/best`.
      formats: Formats to write: "keras", "saved_model", "weights".
      mode: "max", "min", or "auto": "min" for names that contain loss, error, ...
      run: "eval" or "train".
    """

    metric: str
    _: KW_ONLY
    directory: str | os.PathLike[str] | None = None
    formats: Sequence[str] = ("keras",)
    mode: str = "auto"
    run: str = "eval"

    name = "save_best"

    def __post_init__(self) -> None:
        self.formats = names_in("SaveBest formats", self.formats)
        check_fields(self)
        self.best: BestValue = BestValue(self.metric, self.run, self.mode, 0.0)
        self.monitored: BestValue | None = self.best

    @property
    def state(self) -> dict[str, Any]:
        """The best value, and its step and metrics."""
        return {"best": self.best.value, "record": self.best.saved_record()}

    @state.setter
    def state(self, saved: Mapping[str, Any]) -> None:
        self.best.restore(saved["best"], saved.get("record"))

    def on_metrics(self, step: int, values: Mapping[str, float], run: str) -> Decision | None:
        """Requests a save if the metric has a new best value."""
        if (value := self.best.of(values, run)) is None or not self.best.note(value, step, values):
            return None
        directory = None if self.directory is None else os.fspath(self.directory)
        return Decision(export=self.formats, directory=directory)
