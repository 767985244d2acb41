"""Dictionary of results with a short `repr`."""

from collections.abc import Mapping
from typing import Any

from ctl.metrics.protocol import RunEnd


class Results(dict[str, Any]):
    """A dictionary with six digits per float in its `repr`.

    >>> Results({"loss": 0.2244170904159546})
    {'loss': 0.224417}

    Attributes:
      end: Cause of the end of a training, such as `ctl.RunEnd.DONE` or `ctl.RunEnd.TIME_LIMIT`. None for
        an evaluation.
      best_step: Step of the best value: of the weights that were restored; else of the first callback with
        a best value, such as `ctl.EarlyStopping` and `ctl.SaveBest`; else of the setting `keep`. None
        without a best value.
      best_metrics: All metrics of that step, of the kind of the best value, such as "eval_loss".
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        end: RunEnd | None = None,
        best_step: int | None = None,
        best_metrics: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(values)
        self.end, self.best_step = end, best_step
        self.best_metrics = dict(best_metrics or {})

    def __repr__(self) -> str:
        return repr({name: _rounded(value) for name, value in self.items()})


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
