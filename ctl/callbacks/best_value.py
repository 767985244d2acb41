"""Best value of a metric, and the step that had it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ctl.errors import UsageError
from ctl.setting_values import check_choice

_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse")


def smaller_is_better(name: str, mode: str = "auto") -> bool:
    """Returns True if smaller values of a metric are better.

    Args:
      name: Name of the metric.
      mode: "min", "max", or "auto": "min" for names that contain loss, error, perplexity, mae or mse.
    """
    return mode == "min" or (mode == "auto" and any(w in name.lower() for w in _SMALLER_IS_BETTER))


@dataclass(frozen=True)
class BestRecord:
    """Step and metrics of the best value of a metric.

    Attributes:
      step: Number of completed steps.
      run: "eval" or "train", the kind of the metrics; "" if there are none.
      metrics: All metrics of that kind at this step.
      name: Name of the compared metric, or "" if it is unknown.
    """

    step: int
    run: str
    metrics: Mapping[str, float]
    name: str = ""

    def result_metrics(self) -> dict[str, float]:
        """Returns the metrics by their names in the result of a run, such as "eval_loss"."""
        prefix = "eval_" if self.run == "eval" else ""
        return {f"{prefix}{name}": value for name, value in self.metrics.items()}


class BestValue:
    """Best value of a metric in "train" or "eval".

    Args:
      metric: Name of the metric. The prefix "val_" is removed, and then `run` is "eval".
      run: "train" or "eval".
      mode: "min", "max" or "auto", see `smaller_is_better`.
      min_delta: Minimum difference of a better value.

    Attributes:
      metric: Name of the metric.
      run: "train" or "eval".
      value: The best value, or None.
      record: Step and metrics of the best value, or None if `note` has not received them.
    """

    def __init__(self, metric: str, run: str, mode: str, min_delta: float):
        if not isinstance(metric, str) or not metric:
            raise UsageError(f"metric is {metric!r}; expected the name of a metric of the run.")
        if metric.startswith("val_"):  # the name in Keras of a metric of the evaluation
            metric, run = metric.removeprefix("val_"), "eval"
        check_choice("run", run, ("train", "eval"))
        check_choice("mode", mode, ("max", "min", "auto"))
        self.metric, self.run = metric, run
        self._sign = -1.0 if smaller_is_better(metric, mode) else 1.0
        self._min_delta = abs(min_delta)
        self.value: float | None = None
        self.record: BestRecord | None = None

    def of(self, values: Mapping[str, float], run: str) -> float | None:
        """Returns the value of the metric, or None if `run` is another run.

        Args:
          values: Metric by name.
          run: "train" or "eval".

        Raises:
          UsageError: The metric is missing.
        """
        if run != self.run:
            return None
        if self.metric not in values:
            raise UsageError(
                f"a callback requires {self.metric!r}, but the {run} metrics are "
                f"{', '.join(sorted(values))}. Write one of these."
            )
        return float(values[self.metric])

    def beats(self, value: float, other: float | None) -> bool:
        """Returns True if `value` is better than `other`. NaN is never better; other values beat None."""
        if math.isnan(value):
            return False
        return other is None or (value - other) * self._sign > self._min_delta

    def restore(self, value: float | None, record: Mapping[str, Any] | None = None) -> None:
        """Sets the best value of a resumed run, and its record as `saved_record` has returned it."""
        self.value = value
        self.record = None if record is None else BestRecord(**record)

    def saved_record(self) -> dict[str, Any] | None:
        """Returns the record for a checkpoint, or None."""
        return None if self.record is None else asdict(self.record)

    def note(
        self, value: float, step: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Stores a value that is better than the best value. Returns True if it is.

        Args:
          value: Value of the metric.
          step: Number of completed steps; None stores no record.
          metrics: All metrics at this step.
        """
        is_better = self.beats(value, self.value)
        if is_better:
            self.value, self.record = value, None
            if step is not None:
                values = {name: float(v) for name, v in (metrics or {}).items()}
                self.record = BestRecord(step, self.run, values, self.metric)
        return is_better
