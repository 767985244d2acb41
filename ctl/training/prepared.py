"""A trainer with its built and restored model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import TrackedState
from ctl.config import Config
from ctl.distribute.world import World
from ctl.training import error_translation
from ctl.training.active_run import Activity
from ctl.training.callback_runner import CallbackRunner
from ctl.training.checkpointing import Checkpointing
from ctl.training.programs import ProgramCache
from ctl.training.task import Task


@dataclass(frozen=True)
class PreparedTrainer:
    """A trainer with its built and restored model.

    Attributes:
      config: Settings, which are final after `build`.
      task: Methods and objects of the user.
      world: Processes and devices of the job.
      state: Variables of the trainer.
      checkpointing: Saves and restores the state; it has the progress.
      callbacks: Callbacks and hooks.
      programs: Traced loops and functions.
      activity: The current run.
    """

    config: Config
    task: Task
    world: World
    state: TrackedState
    checkpointing: Checkpointing
    callbacks: CallbackRunner
    programs: ProgramCache
    activity: Activity

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.checkpointing.step

    def resume(self, manifest: Manifest) -> None:
        """Continues from a checkpoint that was just restored."""
        self.callbacks.restore(manifest.state.get("watchers", {}))
        self.checkpointing.resume(manifest)

    def peer_errors(self) -> contextlib.AbstractContextManager[None]:
        """Translates errors of lost peers within the block."""
        return error_translation.peer_errors(self.world, lambda: self.step)
