"""The current run of a trainer, for methods that users call in hooks."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import RunInfo
from ctl.supervision.signals import Interruption
from ctl.trackers import run_ids
from ctl.training.batch_size_check import BatchSizeCheck


@dataclass(frozen=True)
class ActiveRun:
    """A call of `train`, or an evaluator process, while it runs.

    Attributes:
      writers: Metric writers of the run.
      interruption: Received signals, which end the run and its evaluations.
      info: Description of the run for writers, or None in an evaluator process.
    """

    writers: WriterGroup
    interruption: Interruption
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


class Activity:
    """The current run of a trainer, and actions that happen once in all of its runs.

    Attributes:
      run: The current run, or None.
      save_request: Request of `Trainer.save` within a run.
      batch_size_check: Warning about small batches.
      has_profiled: True if `ctl profile` has reported.
      has_checked_eval_data: True if the evaluation data was opened and checked.
      eval_set_names: Names of the evaluation sets. Empty for a single set without a name.
      new_run_id: Identifier of the runs of this trainer, unless model_dir has one.
    """

    def __init__(self, *, rows_may_vary: bool) -> None:
        self.run: ActiveRun | None = None
        self.save_request = SaveRequest()
        self.batch_size_check = BatchSizeCheck(is_disabled=rows_may_vary)
        self.has_profiled = False
        self.has_checked_eval_data = False
        self.eval_set_names: tuple[str, ...] = ()
        self.new_run_id = run_ids.new_run_id()

    @contextlib.contextmanager
    def running(self, run: ActiveRun) -> Iterator[None]:
        """Within the block, `run` is the current run."""
        self.run = run
        try:
            yield
        finally:
            self.run = None

    @property
    def writers(self) -> WriterGroup | None:
        """Metric writers of the current run, or None."""
        return None if self.run is None else self.run.writers

    @property
    def interruption(self) -> Interruption | None:
        """Signals received by the current run, or None."""
        return None if self.run is None else self.run.interruption

    def record_profile(self) -> None:
        """Records that `ctl profile` has reported."""
        self.has_profiled = True

    def record_eval_data(self, set_names: Iterable[str]) -> None:
        """Records that the evaluation data was opened and checked, and the names of its sets."""
        self.has_checked_eval_data = True
        self.eval_set_names = tuple(name for name in set_names if name)
