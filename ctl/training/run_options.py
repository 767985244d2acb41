"""Options of one run of a trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctl.callbacks.schedule import Every, Intervals
from ctl.metrics.adapter import MetricWriterLike


@dataclass(frozen=True)
class RunOptions:
    """Options that a user may change between two runs of a prepared trainer.

    Attributes:
      intervals: Intervals of logs, evaluations and saves.
      hparams: Hyperparameters for TensorBoard.
      log_dir: Directory of TensorBoard's event files, or an empty string if the run writes none.
      writers: Metric writers of the user, or names of writers; None: the default ones.
      extra_writers: Metric writers in addition to those.
    """

    intervals: Intervals
    hparams: Mapping[str, Any]
    log_dir: str
    writers: Sequence[MetricWriterLike | str] | None = None
    extra_writers: Sequence[MetricWriterLike] = ()

    @property
    def evaluates(self) -> bool:
        """True if evaluations are requested."""
        return self.intervals.evaluate != Every()
