"""Saving, restoring and rolling back the state of a prepared trainer."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ctl.checkpoints import commit, restoring, saving
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.checkpoints.protocol import CheckpointManager, Manifest, NullCheckpoints
from ctl.checkpoints.tracked_state import TrackedState
from ctl.config import Config
from ctl.data.batches import Batches
from ctl.data.resume_position import SavedIterator
from ctl.distribute import communication, engine_all_reduce
from ctl.distribute.world import World
from ctl.errors import NonFiniteError, UsageError
from ctl.io import paths
from ctl.step.reducers.reducer import GradientReducer
from ctl.training import resume_checks
from ctl.training.error_translation import newest_step_phrase
from ctl.training.progress import Progress

_MAX_ROLLBACKS = 3  # to one checkpoint
_log = logging.getLogger("ctl")


class Checkpointing:
    """State of a trainer, its progress, and its checkpoints.

    Args:
      config: Settings of the trainer.
      world: Processes of the job.
      state: Variables of the trainer.
      manager: Checkpoint manager.
      reducer: Reducer of gradients; its variables are part of the state.
      position: Position of the data iterator, if checkpoints contain it.

    Attributes:
      progress: Position at the newest save, or at the start of the newest run.
      resumed: Manifest of the checkpoint that was restored and is not yet trained on, or None.
      saved_step: Step of the newest checkpoint that was restored or saved.
      manager, position: See the arguments.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrackedState,
        manager: CheckpointManager,
        reducer: GradientReducer,
        position: SavedIterator | None,
    ):
        self.manager, self.position = manager, position
        self._config, self._world, self._state, self._reducer = config, world, state, reducer
        self.progress = Progress()
        self.resumed: Manifest | None = None
        self.saved_step = 0
        self._last_step = 0
        self._num_rollbacks: dict[int, int] = {}  # by the step of the checkpoint

    @property
    def can_save(self) -> bool:
        """False if the trainer has no place for checkpoints."""
        return not isinstance(self.manager, NullCheckpoints)

    @property
    def last_step(self) -> int:
        """The number of completed steps that was read last."""
        return self._last_step

    @property
    def step(self) -> int:
        """Number of completed steps; the last known one if its parameter server is lost."""
        with contextlib.suppress(*communication.PEER_ERRORS):
            self._last_step = int(self._state.step.numpy())
        return self._last_step

    def restore_newest(self) -> Manifest | None:
        """Restores the newest checkpoint on all workers. Returns its manifest, or None if there is none.

        Raises:
          CtlError: On all workers, if one of them fails.
        """
        manager, all_reduce = self.manager, self._world.host_all_reduce
        topology, check_not_deleted = self._world.topology, self._check_not_deleted
        if all_reduce.num_workers == 1 or not manager.is_shared:
            manifest = manager.restore(self._state)
            if manifest is None:
                check_not_deleted()
            resume_checks.check_equal_steps(all_reduce, topology, 0 if manifest is None else manifest.step)
            return manifest

        directory, steps = manager.directory, []
        if directory is not None:
            steps = restoring.newest_step_by_worker(all_reduce, topology, directory)

        def choose() -> int | None:
            if directory is not None and steps:
                restoring.check_newest_is_visible(directory, steps)
            step = manager.choose()
            if step is None:
                check_not_deleted()
            return step

        return self._load(manager, choose)

    def restore_from(self, path: str) -> Manifest:
        """Restores the checkpoint at `path`, or the newest one in a directory, on all workers.

        Raises:
          UsageError: If there is no checkpoint.
        """
        user_path = paths.path(path)
        step = commit.step_of(user_path)
        if step >= 0:
            directory = user_path.parent
        else:
            inside = user_path / "checkpoints"
            directory = inside if paths.call_with_retries(inside.is_dir) else user_path
        manager = ChiefOnlyCheckpoints(str(directory))

        def choose() -> int:
            chosen = step if step >= 0 and user_path.is_dir() else manager.choose() if step < 0 else None
            if chosen is None:
                raise UsageError(
                    f"restore({str(path)!r}): there is no checkpoint; expected a directory such as "
                    "runs/a/checkpoints/ckpt-500, or the model_dir of a run."
                )
            return chosen

        manifest = self._load(manager, choose)
        assert manifest is not None  # `choose` always chooses
        return manifest

    def resume(self, manifest: Manifest) -> None:
        """Continues from a checkpoint that was just restored."""
        self.progress = Progress.from_manifest(manifest, self._config.global_batch_size)
        self.resumed, self.saved_step = manifest, manifest.step
        self._reducer.begin(manifest.step)

    def start_run(self) -> None:
        """Forgets the resumed checkpoint, on which a run trains now."""
        self.resumed = None

    def advance(self, step: int, batches: Batches | None = None) -> None:
        """Counts the examples consumed up to `step`, from `batches` if they are open."""
        max_examples = None if batches is None else batches.examples
        self.progress = self.progress.advanced(step, self._config.global_batch_size, max_examples)

    def record_state(self, metrics: Mapping[str, float], loop_state: Mapping[str, Any]) -> None:
        """Sets the metrics and the loop state that the next checkpoint stores."""
        self.progress = replace(self.progress, metrics=metrics, loop_state=loop_state)

    def record_pass(self, num_batches: int) -> None:
        """Sets the number of batches of a pass over data of unknown length."""
        self.progress = replace(self.progress, pass_batches=num_batches)

    def record_data(self, step: int, batches: Batches) -> None:
        """Sets the position in the training data, which are open, after `step`."""
        self.advance(step, batches)
        self.progress = replace(
            self.progress,
            data_position_mode=batches.mode,
            data_description=batches.description,
            iterator_state=batches.iterator_state(self.progress.examples),
            order_seed=batches.order_seed,
        )

    def record_saved(self, step: int) -> None:
        """Sets the step of the newest checkpoint."""
        self.saved_step = step

    def save(self, step: int, configuration: Mapping[str, Any], *, has_data: bool = False) -> str | None:
        """Saves a checkpoint of `step`. All workers call it at the same step.

        Args:
          step: Number of completed steps.
          configuration: Settings and versions for the manifest.
          has_data: True within a run, after `record_data`.

        Returns:
          The path, on a worker that has written the checkpoint before the return; else None.
        """
        if has_data and self.position is not None:
            self.position.capture()
        worker_state = self._reducer.worker_state if self.can_save else None
        if worker_state is not None:
            worker_state.gather()
        path = self.manager.save(self._state, self.manifest(step, configuration))
        if worker_state is not None:
            worker_state.release()
        if path is not None:
            self.record_saved(step)
        return path

    def opened(
        self, on_saved: Callable[[int, str], None], fence: Callable[[], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Prepares the manager for a block of steps, and completes its saves at the end.

        Args:
          on_saved: Called with the step and the path of a checkpoint that was written in the background.
          fence: Raises an error if this process may no longer write.
        """
        if fence is not None:
            self.manager.fence(fence)

        def notify(step: int, path: str) -> None:
            self.record_saved(step)
            on_saved(step, path)

        return saving.opened_manager(self.manager, self._state, notify)

    def roll_back(self, step: int, batches: Batches) -> Manifest:
        """Restores the newest checkpoint and continues with later data.

        Raises:
          NonFiniteError: Without a checkpoint, or after too many rollbacks to the same one.
        """
        self.advance(step, batches)
        self.manager.finish()  # a save in the background
        self._world.wait_for_all_workers()  # afterwards all workers find the same checkpoints
        manifest = self.restore_newest()
        if manifest is None:
            raise NonFiniteError(
                f"Step {step}: there is no checkpoint to roll back to. Save more often "
                "(--save_every_steps), or write --on_nonfinite=skip."
            )
        target = manifest.step
        count = self._num_rollbacks[target] = self._num_rollbacks.get(target, 0) + 1
        if count > _MAX_ROLLBACKS:
            raise NonFiniteError(
                f"Step {step}: {_MAX_ROLLBACKS} rollbacks to the checkpoint of step {target}, each with "
                f"other data, had no success; {newest_step_phrase(self.manager)}. Lower the learning rate."
            )
        self.progress = self.progress.rolled_back(target)
        self._reducer.begin(target)
        if self._world.is_chief:
            _log.warning(
                "Step %d: rolling back to the checkpoint of step %d; training continues with later data "
                "and skips the %d examples since then (rollback %d of %d).",
                step,
                target,
                (step - target) * self._config.global_batch_size,
                count,
                _MAX_ROLLBACKS,
            )
        return manifest

    def manifest(self, step: int, configuration: Mapping[str, Any]) -> Manifest:
        """Returns the manifest of a checkpoint of `step`."""
        world, topology = self._world, self._world.topology
        return self.progress.to_manifest(
            step,
            variables=self._state.spec(),
            world={
                "workers": topology.num_workers,
                "replicas": topology.num_replicas,
                "strategy": world.strategy_name,
                "communication": engine_all_reduce.path_of(world.strategy),
                "network": engine_all_reduce.network_record(world.strategy),
                "global_batch_size": self._config.global_batch_size,
            },
            seed=self._config.seed,
            config=configuration,
        )

    def _load(self, manager: CheckpointManager, choose: Callable[[], int | None]) -> Manifest | None:
        """Restores the checkpoint that the chief chooses, on all workers."""
        return restoring.load_choice_of_chief(
            self._world.host_all_reduce,
            self._world.topology,
            choose,
            lambda step: manager.restore(self._state, step),
            restoring.manifest_checksum,
        )

    def _check_not_deleted(self) -> None:
        resume_checks.check_not_deleted(self._config.model_dir, self._world.topology, self.manager)
