"""Best evaluation by the metric with which a checkpoint manager keeps the best checkpoint."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ctl.callbacks.best_value import BestRecord, BestValue
from ctl.checkpoints.protocol import CheckpointManager


class KeptBest:
    """Record of the best evaluation of a run, equal on all workers.

    Args:
      manager: Checkpoint manager, which names the metric.
      best_values: Best values of callbacks, which have priority.

    Attributes:
      record: Step and metrics of the best evaluation, or None.
    """

    def __init__(self, manager: CheckpointManager, best_values: Sequence[BestValue]):
        self._manager, self._best_values = manager, best_values
        self.record: BestRecord | None = None

    def best(self) -> BestRecord | None:
        """Returns the record of the first callback that has one, else of the checkpoint manager."""
        return next((v.record for v in self._best_values if v.record is not None), self.record)

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores an evaluation that is better than all earlier ones, or equal to the best one."""
        name = self._manager.best_metric
        if name is None or math.isnan(metrics.get(name, math.nan)):
            return
        if self.record is None or self._manager.is_better(metrics[name], self.record.metrics[name]):
            self.record = BestRecord(step, "eval", dict(metrics), name)

    def state(self) -> dict[str, Any] | None:
        """Returns the record for a checkpoint, or None."""
        return None if self.record is None else asdict(self.record)

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restores the record that `state` has returned, unless the metric has changed."""
        record = None if saved is None else BestRecord(**saved)
        self.record = None if record is None or record.name != self._manager.best_metric else record
