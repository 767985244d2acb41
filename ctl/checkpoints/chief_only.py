"""Default checkpoint manager: all workers read the variables, and only the chief writes files.

Reading a variable that is a sum over workers (metrics, some normalizations) is a collective, which blocks
until all workers take part. Writing contains no collective, so an error of the chief's disk cannot change
their order.
"""

import contextlib
import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ctl.checkpoints import commit, restoring
from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.checkpoints.retention import Keep
from ctl.checkpoints.saving import Saving, save_error
from ctl.checkpoints.snapshot import SnapshotReader, restore_state, write_with_tensorflow
from ctl.checkpoints.tracked_state import TrackedState
from ctl.errors import CheckpointError, StorageError, UsageError
from ctl.io import disk_errors, paths
from ctl.io.paths import AnyPath
from ctl.setting_values import check_type

_MAX_PROBE_BYTES = 1 << 26
_log = logging.getLogger("ctl")


class ChiefOnlyCheckpoints(CheckpointManager):
    """A manager of checkpoints in `directory/ckpt-<step>/`, which all workers must share.

    >>> manager = ctl.ChiefOnlyCheckpoints("/tmp/m/checkpoints", keep=ctl.Keep(newest=3))

    Args:
      directory: A local path, or a URL such as gs://bucket/run/checkpoints.
      keep: The checkpoints to keep.
      background: If True, the chief copies the variables and writes them in a thread while training
        continues.
      on_error: Reaction to a checkpoint that cannot be written, for example because the disk is full:
        "continue" with a warning, or "raise". The last save of a run always raises.
    """

    directory: AnyPath
    is_shared = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: Keep = Keep(),  # noqa: B008  frozen
        background: bool = False,
        on_error: str = "continue",
    ):
        check_type("keep", keep, Keep)
        check_type("background", background, bool)
        self.directory = paths.path(directory)
        self.keep = keep
        self._background = bool(background)
        self._saving = Saving(on_error=on_error)
        self._reader = SnapshotReader()
        self._choice: restoring.Choice | None = None
        self._damaged_paths: list[AnyPath] = []  # of the newest choice
        self._has_checkpoint = False  # a checkpoint has been saved or restored
        self._on_saved: Callable[[int, str], None] = lambda step, path: None
        self._fence: Callable[[], None] = lambda: None
        self._owner = secrets.token_hex(4)  # part of the names of incomplete directories

    def fence(self, check: Callable[[], None]) -> None:
        """Calls `check` before each commit. It raises if another job has taken the directory over."""
        self._fence = check

    def save(self, state: TrackedState, manifest: Manifest) -> str | None:
        """Writes and commits a checkpoint.

        Waits for the previous background save.

        Returns:
          The path on the chief, None on the other workers and for a background save, which only starts.

        Raises:
          SaveError: If this or the previous background save failed and `on_error` is "raise".
        """
        self._saving.wait()
        self._saving.check()
        is_chief = state.topology.is_chief
        if is_chief:
            manifest = replace(manifest, paths=state.paths)
        snapshot = self._reader.take(state, keep=is_chief, copy=self._background)
        if snapshot is None:
            return self._save_on_all_workers(state, manifest)
        if not is_chief:
            return None
        manifest = replace(manifest, keys=snapshot.keys)
        write = functools.partial(self._commit, manifest, snapshot.write, snapshot.num_bytes)
        if self._background:
            self._saving.start(lambda: self._on_saved(manifest.step, write()))
            return None
        return self._saving.run(write)

    def choose(self) -> int | None:
        """Returns the step of the newest undamaged checkpoint, or None if there is no checkpoint.

        Only the chief calls it; all workers then restore this step. A warning names the file and the cause
        for each damaged checkpoint. `begin` moves the damaged ones away.

        Raises:
          CheckpointError: If all checkpoints are damaged.
          ReadError: If a newer checkpoint cannot be read at present.
        """
        self._saving.wait()
        self._damaged_paths = []  # stays empty if the next line raises
        self._choice = restoring.newest_checkpoint(self.directory)
        if self._choice is None:
            return None
        self._damaged_paths = list(self._choice.damaged)
        return self._choice.manifest.step

    def restore(self, state: TrackedState, step: int | None = None) -> Manifest | None:
        """Restores the checkpoint of `step`, by default the newest undamaged one.

        Workers other than the chief wait until the checkpoint is visible to them.

        Raises:
          CheckpointError: If there is no undamaged checkpoint of `step`, or it belongs to another model.
          ReadError: If it cannot be read at present.
        """
        self._saving.wait()
        if step is None:
            step = self.choose()
            if step is None:
                return None
        choice, self._choice = self._choice, None
        if choice is not None and choice.manifest.step == step:
            path, manifest = choice.path, choice.manifest  # verified by `choose`
        elif state.topology.is_chief or state.topology.num_workers == 1:
            path, manifest = restoring.find_checkpoint(self.directory, step)
        else:
            path, manifest = restoring.wait_for_checkpoint(self.directory, step)
        state.check_matches(manifest.variables, str(path))
        restore_state(state, path, manifest.variables)
        self._has_checkpoint = True
        return manifest

    def begin(self, state: TrackedState, on_saved: Callable[[int, str], None]) -> None:
        """Cleans up the directory on the chief: deletes leftovers, moves damaged checkpoints away.

        A run that saves in this directory calls it after all workers have restored. Before, another worker
        or the job that owns the directory may still use these files.
        """
        self._on_saved = on_saved
        if not state.topology.is_chief:
            return
        for path in self._damaged_paths:
            try:
                if path.exists():
                    moved = commit.move_to_damaged(path)
                    _log.warning("Moved the damaged checkpoint %s to %s.", path.name, moved)
            except OSError as e:
                _log.warning("Cannot move the damaged checkpoint %s: %s.", path, e)
        self._damaged_paths = []
        try:
            for name in commit.delete_leftovers(self.directory):
                _log.info("Removed %s, left by an interrupted save in %s.", name, self.directory)
        except OSError as e:
            _log.warning("Cannot clean up %s: %s.", self.directory, e)
        self._check_disk_space(state)

    def _check_disk_space(self, state: TrackedState) -> None:
        """Checks before the first step that a checkpoint fits on the disk.

        Raises:
          UsageError: If the disk is too small, or a later attempt would also fail.
          StorageError: If there may be space later.
        """
        num_bytes = sum(v.dtype.size * (v.shape.num_elements() or 0) for v in state.variables.values())
        free = paths.free_bytes(self.directory)
        try:
            _check_free_bytes(free, num_bytes)
            paths.call_with_retries(
                lambda: paths.probe(self.directory, min(num_bytes, _MAX_PROBE_BYTES)),
                is_permanent=lambda error: (
                    disk_errors.is_full(error) or not disk_errors.is_transient(error)
                ),
            )
        except OSError as e:
            available = "" if free is None else f" and {free:,} are free"
            message = (
                f"{self.directory} cannot hold a checkpoint: {e.strerror or e}. It needs {num_bytes:,} "
                f"bytes{available}. Free some space, or give another --model_dir."
            )
            if int(state.step.numpy()):  # the disk of a resumed run may have space by the next save
                _log.warning("%s", message)
                return
            is_too_small = num_bytes > paths.total_bytes(self.directory)
            may_pass = disk_errors.is_transient(e) and not is_too_small
            raise (StorageError if may_pass else UsageError)(message) from e

    def amend(self, step: int, metrics: Mapping[str, float], state: Mapping[str, Any]) -> bool:
        """Adds an evaluation to the manifest of `step`, on the chief. Returns False if this fails."""
        self._saving.wait()
        try:
            self._fence()
            commit.amend_manifest(self.directory / f"ckpt-{step}", metrics, state)
        except (OSError, CheckpointError):
            return False
        self._delete_surplus()  # the best checkpoint may have changed
        return True

    def finish(self) -> None:
        """Waits for a background save. Raises SaveError if the newest save failed."""
        self._saving.wait()
        self._saving.raise_error()

    @property
    def best_metric(self) -> str | None:
        """Name of the metric by which the best checkpoint is kept, or None."""
        return self.keep.best

    def is_better(self, value: float, other: float) -> bool:
        """Compares values as `keep` does."""
        return self.keep.is_better(value, other)

    def steps(self) -> list[int]:
        """Returns the steps of the committed checkpoints, ascending."""
        return [m.step for _, m in commit.list_checkpoints(self.directory)]

    def _commit(self, manifest: Manifest, write: Callable[[str], object], num_bytes: int) -> str:
        """Writes a checkpoint, deletes surplus ones and returns the path. Runs on any thread."""
        path = self.directory / f"ckpt-{manifest.step}"
        if self._has_checkpoint and not self.directory.exists():
            _log.warning(
                "%s was deleted during training: its checkpoints are lost. The checkpoint of step %d is "
                "the first in the new directory.",
                self.directory,
                manifest.step,
            )
        try:
            _check_free_bytes(paths.free_bytes(self.directory), num_bytes)
            commit.write_checkpoint(self.directory, manifest, write, owner=self._owner, fence=self._fence)
        except OSError as e:
            with contextlib.suppress(OSError):
                self._fence()  # the other job may have deleted the incomplete files
            raise save_error(manifest.step, path, e, num_bytes, self._newest_step()) from e
        self._has_checkpoint = True
        self._delete_surplus()
        return str(path)

    def _save_on_all_workers(self, state: TrackedState, manifest: Manifest) -> str | None:
        """Saves synchronously with `tf.train.Checkpoint.write`, which reads on every worker."""
        if state.topology.is_chief:
            return self._saving.run(
                lambda: self._commit(manifest, lambda prefix: write_with_tensorflow(state, prefix), 0)
            )
        temporary = self.directory / f"workertemp_{state.topology.worker_index}"
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            write_with_tensorflow(state, str(temporary / commit.STATE))
        finally:
            commit.discard_directory(temporary)
        return None

    def _delete_surplus(self) -> None:
        try:
            checkpoints = commit.list_checkpoints(self.directory)
        except OSError as e:
            _log.warning("Cannot list the checkpoints in %s: %s.", self.directory, e)
            return
        path_by_step = {m.step: path for path, m in checkpoints}
        for manifest in self.keep.surplus([m for _, m in checkpoints]):
            path = path_by_step[manifest.step]
            try:
                commit.remove_checkpoint(path)
            except OSError as e:
                _log.warning("Cannot delete the old checkpoint %s: %s.", path, e)

    def _newest_step(self) -> int | None:
        with contextlib.suppress(OSError):
            return max(self.steps(), default=None)
        return None


def _check_free_bytes(free: int | None, num_bytes: int) -> None:
    """Raises OSError (ENOSPC) if fewer than `num_bytes` are free. None: unknown."""
    if free is not None and free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
