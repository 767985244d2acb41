"""What a trainer keeps between its calls, once it is prepared."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.checkpoints.tracked_state import TrackedState
from ctl.data.passes import COUNT_AGAIN
from ctl.data.resume_position import SavedIterator
from ctl.distribute import communication
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import RunInfo
from ctl.step.reducers.reducer import GradientReducer
from ctl.step.step_times import StepTimes
from ctl.supervision.lease import Lease
from ctl.supervision.signals import Signals
from ctl.training.callback_runner import CallbackRunner
from ctl.training.graph_loop import StepLoop
from ctl.training.loop import GraphLoop
from ctl.training.trainer_protocol import TrainerProtocol


@dataclass
class Session:
    """What a prepared trainer keeps.

    Attributes:
      state: its variables; manager: where they are saved; resumed: what was restored, or None.
      examples: consumed since the start of the data, up to the newest save.
      agreement: sums over workers; callbacks: with what they know.
      position: of the data's iterator, where that is what is saved.
    """

    state: TrackedState
    manager: CheckpointManager
    agreement: HostAllReduce
    callbacks: CallbackRunner
    reducer: GradientReducer
    step_times: StepTimes | None = None  # of several workers in step, or for `ctl profile`
    position: SavedIterator | None = None
    resumed: Manifest | None = None
    loop_state: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)  # evaluated at the newest save
    examples: int = 0
    at: int = 0  # the step that `examples` belongs to
    saved: int = 0  # the step of the newest checkpoint that was restored or saved
    train_loop: GraphLoop | None = None
    eval_loop: StepLoop | None = None
    predicts: Any = None  # the model that `predict_call` was traced for
    predict_call: Any = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # of the newest evaluation, see there
    running: WriterGroup | None = None
    info: RunInfo | None = None  # of the run that is on
    last_step: int = 0  # that was read
    rollbacks: dict[int, int] = field(default_factory=dict)  # to a step -> how often
    lease: Lease | None = None  # of model_dir, on the chief, while it trains
    signals: Signals | None = None  # while it trains
    save_asked: bool = False  # within a run: at the end of this loop
    short_steps: int = 0  # without a full batch among them
    source: str | None = None  # a line about the data of the newest checkpoint
    pass_batches: int | None = None  # of data of unknown length, once a pass has ended
    profiled: bool = False  # `ctl profile` has measured a step
    mode: str = "indexed"  # how its place in the data is found again

    def take(self, manifest: Manifest, global_batch_size: int) -> None:
        """Goes on from a checkpoint that was just restored."""
        self.callbacks.restore(manifest.state.get("watchers", {}))
        self.resumed, self.loop_state, self.metrics = manifest, manifest.state, manifest.metrics
        self.at = self.saved = manifest.step
        self.examples = int(manifest.data.get("examples", manifest.step * global_batch_size))
        self.pass_batches = manifest.data.get("pass_batches")
        if self.pass_batches and manifest.world.get("global_batch_size") != global_batch_size:
            self.pass_batches = COUNT_AGAIN
        self.mode, self.source = manifest.data.get("mode", self.mode), manifest.data.get("source")

    def check_lease(self) -> None:
        """Raises LeaseLostError if another job has taken model_dir over."""
        if self.lease is not None:
            self.lease.check()

    @property
    def step(self) -> int:
        """Completed steps; those last known, where the parameter server that counts them is gone."""
        with contextlib.suppress(*communication.PEER_ERRORS):
            self.last_step = int(self.state.step.numpy())
        return self.last_step

    def advance(self, step: int, global_batch_size: int, limit: int | None = None) -> None:
        """Counts the examples consumed up to `step`; `limit`, where the last batch was short."""
        self.examples += (step - self.at) * global_batch_size
        if limit is not None:
            self.examples = min(self.examples, limit)
        self.at = step


class SessionOwner(TrainerProtocol, Protocol):
    """A trainer with its session, which is None until the trainer is prepared."""

    _session: Session | None
