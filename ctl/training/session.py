"""State of a prepared trainer."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.checkpoints.tracked_state import TrackedState
from ctl.data.batches import Batches
from ctl.data.resume_position import SavedIterator
from ctl.distribute import communication
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.metrics.group import WriterGroup
from ctl.step.reducers.reducer import GradientReducer
from ctl.step.step_times import StepTimes
from ctl.supervision.lease import Lease
from ctl.supervision.signals import Signals
from ctl.training.active_run import ActiveRun, SaveRequest
from ctl.training.batch_size_check import BatchSizeCheck
from ctl.training.callback_runner import CallbackRunner
from ctl.training.programs import ProgramCache
from ctl.training.progress import Progress
from ctl.training.trainer_protocol import TrainerProtocol


@dataclass
class Session:
    """State of a prepared trainer, between and during its calls.

    Attributes:
      state: Variables of the trainer.
      manager: Checkpoint manager.
      agreement: Sums over workers.
      callbacks: Callbacks with their state.
      reducer: Reducer of gradients.
      step_times: Timer of workers in step, or for `ctl profile`. None where steps cannot be timed.
      position: Position of the data iterator, if checkpoints contain it.
      programs: Traced loops and functions.
      save_request: Request of `Trainer.save` within a run.
      progress: Position at the newest save, or at the start of the newest run.
      resumed: Manifest of the checkpoint that was restored and is not yet trained on, or None.
      saved: Step of the newest checkpoint that was restored or saved.
      active: The current run, or None.
      lease: Lease of model_dir, on the chief during a run.
      arrays: Arrays of the newest evaluation by name.
      rollbacks: Number of rollbacks by the step of the checkpoint.
      batch_size_check: Warning about small batches.
      profiled: True if `ctl profile` has reported.
    """

    state: TrackedState
    manager: CheckpointManager
    agreement: HostAllReduce
    callbacks: CallbackRunner
    reducer: GradientReducer
    step_times: StepTimes | None = None
    position: SavedIterator | None = None
    programs: ProgramCache = field(default_factory=ProgramCache)
    save_request: SaveRequest = field(default_factory=SaveRequest)
    progress: Progress = Progress()
    resumed: Manifest | None = None
    saved: int = 0
    active: ActiveRun | None = None
    lease: Lease | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    rollbacks: dict[int, int] = field(default_factory=dict)
    batch_size_check: BatchSizeCheck = field(default_factory=BatchSizeCheck)
    profiled: bool = False
    _last_step: int = 0
    _has_checked_eval_data: bool = False

    def resume(self, manifest: Manifest, global_batch_size: int) -> None:
        """Continues from a checkpoint that was just restored."""
        self.callbacks.restore(manifest.state.get("watchers", {}))
        self.progress = Progress.from_manifest(manifest, global_batch_size)
        self.resumed, self.saved = manifest, manifest.step
        self.reducer.begin(manifest.step)

    def roll_back(self, manifest: Manifest) -> None:
        """Continues from an earlier checkpoint, which was just restored, with later data."""
        self.progress = self.progress.rolled_back(manifest.step)
        self.reducer.begin(manifest.step)
        self.callbacks.restore(manifest.state.get("watchers", {}))

    def count_rollback(self, step: int) -> int:
        """Counts a rollback to the checkpoint of `step`; returns their number."""
        self.rollbacks[step] = self.rollbacks.get(step, 0) + 1
        return self.rollbacks[step]

    def advance(self, step: int, global_batch_size: int, batches: Batches | None = None) -> None:
        """Counts the examples consumed up to `step`, from `batches` if they are open."""
        max_examples = None if batches is None else batches.examples
        self.progress = self.progress.advanced(step, global_batch_size, max_examples)

    def record_state(self, metrics: Mapping[str, float], loop_state: Mapping[str, Any]) -> None:
        """Sets the metrics and the loop state that the next checkpoint stores."""
        self.progress = replace(self.progress, metrics=metrics, loop_state=loop_state)

    def record_data(self, batches: Batches) -> None:
        """Sets the position in the data that the next checkpoint stores."""
        self.progress = replace(
            self.progress, data_position_mode=batches.mode, data_description=batches.description
        )
        if self.position is not None:
            self.position.capture()

    def record_pass(self, num_batches: int) -> None:
        """Sets the number of batches of a pass over data of unknown length."""
        self.progress = replace(self.progress, pass_batches=num_batches)

    def record_checkpoint(self, step: int) -> None:
        """Sets the step of the newest checkpoint."""
        self.saved = step

    def record_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets the arrays of the newest evaluation."""
        self.arrays = arrays

    def record_profile(self) -> None:
        """Notes that `ctl profile` has reported, which it does once."""
        self.profiled = True

    @contextlib.contextmanager
    def running(self, active: ActiveRun) -> Iterator[None]:
        """Within the block, `active` is the current run."""
        self.active, self.resumed = active, None
        try:
            yield
        finally:
            self.active = None

    @property
    def writers(self) -> WriterGroup | None:
        """Metric writers of the current run, or None."""
        return None if self.active is None else self.active.writers

    @property
    def signals(self) -> Signals | None:
        """Signals received by the current run, or None."""
        return None if self.active is None else self.active.signals

    @property
    def has_checked_eval_data(self) -> bool:
        """True if the evaluation data was opened before."""
        return self._has_checked_eval_data

    def record_eval_data(self) -> None:
        """Notes that the evaluation data was opened and checked."""
        self._has_checked_eval_data = True

    def check_lease(self) -> None:
        """Raises LeaseLostError if another job has taken over model_dir."""
        if self.lease is not None:
            self.lease.check()

    @property
    def last_step(self) -> int:
        """The number of completed steps that was read last."""
        return self._last_step

    @property
    def step(self) -> int:
        """Number of completed steps; the last known one if its parameter server is lost."""
        with contextlib.suppress(*communication.PEER_ERRORS):
            self._last_step = int(self.state.step.numpy())
        return self._last_step


class SessionOwner(TrainerProtocol, Protocol):
    """A trainer with its session, which is None until the trainer is prepared."""

    _session: Session | None
