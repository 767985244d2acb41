"""The default manager: all workers take part in a save, the chief writes it.

Reading a variable that is a sum over workers (metrics, some normalizations) is a collective, and would
wait for ever if only the chief saved. Therefore all workers read the variables, and the chief alone writes
files, so that an error of the disk cannot change the order of collectives.
"""

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ctl.checkpoints import commit, restoring
from ctl.checkpoints.protocol import CheckpointManager, Manifest
from ctl.checkpoints.retention import Keep
from ctl.checkpoints.saving import Saving, failed
from ctl.checkpoints.snapshot import Reader, restore_state, write_plainly
from ctl.checkpoints.tracked_state import TrackedState
from ctl.errors import CheckpointError, StorageError, UsageError
from ctl.io import disk_errors, paths
from ctl.io.paths import AnyPath

_MOST_PROBED = 1 << 26  # bytes that are written to see whether there is room
_log = logging.getLogger("ctl")


class ChiefOnlyCheckpoints(CheckpointManager):
    """Checkpoints in `directory/ckpt-<step>/`; all workers must see the same directory.

    >>> manager = ctl.ChiefOnlyCheckpoints("/tmp/m/checkpoints", keep=ctl.Keep(newest=3))
    """

    directory: AnyPath
    is_shared = True

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: Keep = Keep(),  # noqa: B008  frozen
        background: bool = False,
        on_error: str = "continue",
    ):
        """Keeps; touches nothing.

        Args:
          directory: a path, or a URL such as gs://bucket/run/checkpoints.
          background: write while training goes on; a save then takes the time of a copy.
          on_error: what a full disk does to training: "continue" with a warning, or "raise". The
            last save of a run raises in any case.
        """
        self.directory = paths.path(directory)
        self.keep = keep
        self._background = bool(background)
        self._saving = Saving(on_error=on_error)
        self._reader = Reader()
        self._damaged: list[AnyPath] = []  # seen when a checkpoint was chosen
        self._there = False  # whether something was saved or restored here
        self._choice: restoring.Choice | None = None
        self._told: Callable[[int, str], None] = lambda step, path: None
        self._fence: Callable[[], None] = lambda: None
        self._owner = secrets.token_hex(4)  # in the names of what is not complete

    def fence(self, check: Callable[[], None]) -> None:
        """Calls `check` before each commit: it raises where another job has taken the directory over."""
        self._fence = check

    def save(self, state: TrackedState, manifest: Manifest) -> str | None:
        """Writes and commits; returns the path on the chief, None elsewhere.

        In the background it begins to, and returns None; the save before is complete then, or its
        error is raised. Raises SaveError as `on_error` says.
        """
        self._saving.wait()
        self._saving.check()
        chief = state.topology.is_chief
        if chief:
            manifest = replace(manifest, paths=state.paths)
        snapshot = self._reader.take(state, keep=chief, copy=self._background)
        if snapshot is None:
            return self._save_together(state, manifest)
        if not chief:
            return None
        manifest = replace(manifest, keys=snapshot.keys)
        if self._background:
            self._saving.start(
                lambda: self._told(
                    manifest.step, self._commit(manifest, snapshot.write, snapshot.num_bytes)
                )
            )
            return None
        return self._here(manifest, snapshot.write, snapshot.num_bytes)

    def choose(self) -> int | None:
        """The step to restore: that of the newest undamaged checkpoint; None if there is none.

        For the chief, who decides for all workers; the others then restore this step. Damaged ones
        are passed over with a warning that names the file and the cause; `begin` sets them aside.
        Raises CheckpointError if all are damaged, ReadError where one cannot be read for now.
        """
        self._saving.wait()
        self._damaged = []  # nothing is touched if this raises
        self._choice = restoring.newest_checkpoint(self.directory)
        if self._choice is None:
            return None
        self._damaged = list(self._choice.damaged)
        return self._choice.manifest.step

    def restore(self, state: TrackedState, step: int | None = None) -> Manifest | None:
        """Restores the newest undamaged checkpoint, or exactly that of `step`.

        A worker that is not the chief waits until it sees the one of `step`. Raises what `choose`
        does; CheckpointError if there is no good one of `step`, or it is of another model.
        """
        self._saving.wait()
        if step is None:
            step = self.choose()
            if step is None:
                return None
        chosen, self._choice = self._choice, None
        if chosen is not None and chosen.manifest.step == step:
            path, manifest = chosen.path, chosen.manifest  # just verified
        elif state.topology.is_chief or state.topology.num_workers == 1:
            path, manifest = restoring.of_step(self.directory, step)
        else:
            path, manifest = restoring.awaited(self.directory, step)
        state.check_matches(manifest.variables, str(path))
        restore_state(state, path, manifest.variables)
        self._there = True
        return manifest

    def begin(self, state: TrackedState, told: Callable[[int, str], None]) -> None:
        """Tidies up, on the chief: left-overs are deleted, damaged checkpoints are set aside.

        To be called when every worker has restored, by a run that saves here: until then another
        worker, or the training that this directory belongs to, may be busy in it.
        """
        self._told = told
        if not state.topology.is_chief:
            return
        for path in self._damaged:
            try:
                if path.exists():
                    _log.warning("Set aside: %s is now %s.", path.name, commit.set_aside(path))
            except OSError as e:
                _log.warning("Cannot set the damaged checkpoint %s aside: %s.", path, e)
        self._damaged = []
        try:
            for name in commit.sweep(self.directory):
                _log.info("Removed %s, left by an interrupted save in %s.", name, self.directory)
        except OSError as e:
            _log.warning("Cannot tidy up %s: %s.", self.directory, e)
        self._check_room(state)

    def _check_room(self, state: TrackedState) -> None:
        """Checks before the first step whether a checkpoint fits on the disk.

        Raises:
          UsageError: If the disk is too small, or a later attempt would fail as well.
          StorageError: If there may be space later.
        """
        num_bytes = sum(v.dtype.size * (v.shape.num_elements() or 0) for v in state.variables.values())
        free = paths.bytes_free(self.directory)
        try:
            if free is not None and free < num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            paths.persistently(
                lambda: paths.probe(self.directory, min(num_bytes, _MOST_PROBED)),
                is_lasting=lambda error: disk_errors.is_full(error) or not disk_errors.is_transient(error),
            )
        except OSError as e:
            left = "" if free is None else f" and {free:,} are free"
            said = (
                f"{self.directory} cannot hold a checkpoint: {e.strerror or e}. It needs {num_bytes:,} "
                f"bytes{left}. Free some space, or give another --model_dir."
            )
            if int(state.step.numpy()):  # a run that goes on: its disk may have room again by the next save
                _log.warning("%s", said)
                return
            is_too_small = num_bytes > paths.bytes_in_total(self.directory)
            may_pass = disk_errors.is_transient(e) and not is_too_small
            raise (StorageError if may_pass else UsageError)(said) from e

    def amend(self, step: int, metrics: Mapping[str, float], state: Mapping[str, Any]) -> bool:
        """Notes, on the chief, what was evaluated after the save of `step`; False if it cannot be."""
        self._saving.wait()
        try:
            self._fence()
            commit.amend(self.directory / f"ckpt-{step}", metrics, state)
        except (OSError, CheckpointError):
            return False
        self._delete_surplus()  # the best may be another one now
        return True

    def finish(self) -> None:
        """Waits for a save in the background; raises SaveError if the newest save failed."""
        self._saving.wait()
        self._saving.raise_error()

    @property
    def best_metric(self) -> str | None:
        return self.keep.best

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return [m.step for _, m in commit.scan(self.directory)]

    def _commit(self, manifest: Manifest, write: Callable[[str], object], num_bytes: int) -> str:
        """Writes, deletes what need not stay, tells; on any thread."""
        path = self.directory / f"ckpt-{manifest.step}"
        if self._there and not self.directory.exists():
            _log.warning(
                "%s was deleted while training: its checkpoints are lost. That of step %d begins it anew.",
                self.directory,
                manifest.step,
            )
        try:
            free = paths.bytes_free(self.directory)
            if free is not None and free < num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            commit.write_checkpoint(self.directory, manifest, write, owner=self._owner, fence=self._fence)
        except OSError as e:
            with contextlib.suppress(OSError):
                self._fence()  # then the other job has tidied up what was being written
            raise failed(manifest.step, path, e, num_bytes, self._newest()) from e
        self._there = True
        self._delete_surplus()
        return str(path)

    def _here(self, manifest: Manifest, write: Callable[[str], object], num_bytes: int) -> str | None:
        done: list[str] = []
        self._saving.run(lambda: done.append(self._commit(manifest, write, num_bytes)))
        return done[0] if done else None

    def _save_together(self, state: TrackedState, manifest: Manifest) -> str | None:
        """As TensorFlow does it: reading is part of writing, so every worker writes, here and now."""
        if state.topology.is_chief:
            return self._here(manifest, lambda prefix: write_plainly(state, prefix), 0)
        own = self.directory / f"workertemp_{state.topology.worker_index}"
        try:
            own.mkdir(parents=True, exist_ok=True)
            write_plainly(state, str(own / commit.STATE))
        finally:
            commit.discard(own)
        return None

    def _delete_surplus(self) -> None:
        try:
            found = commit.scan(self.directory)
        except OSError as e:
            _log.warning("Cannot look for old checkpoints in %s: %s.", self.directory, e)
            return
        places = {m.step: p for p, m in found}
        for manifest in self.keep.surplus([m for _, m in found]):
            try:
                commit.remove_checkpoint(places[manifest.step])
            except OSError as e:
                _log.warning("Cannot delete the old checkpoint %s: %s.", places[manifest.step], e)

    def _newest(self) -> int | None:
        with contextlib.suppress(OSError):
            return max(self.steps(), default=None)
        return None
