"""The current run of a trainer, for methods that users call in hooks."""

from dataclasses import dataclass

from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import RunInfo
from ctl.supervision.signals import Signals


@dataclass(frozen=True)
class ActiveRun:
    """A call of `train`, or an evaluator process, while it runs.

    Attributes:
      writers: Metric writers of the run.
      signals: Received signals, which end the run and its evaluations.
      info: Description of the run for writers, or None in an evaluator process.
    """

    writers: WriterGroup
    signals: Signals
    info: RunInfo | None = None


class SaveRequest:
    """Request of `Trainer.save` within a run. The checkpoint is saved at the end of the loop."""

    def __init__(self) -> None:
        self._is_pending = False

    def submit(self) -> None:
        """Requests a save."""
        self._is_pending = True

    def take(self) -> bool:
        """Returns True if a save was requested since the last call."""
        is_pending, self._is_pending = self._is_pending, False
        return is_pending
