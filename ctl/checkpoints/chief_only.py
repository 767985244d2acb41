"""The default manager: all workers take part in a save, the chief's directory remains.

Variables that are summed when read (metrics, some normalisations) hang a save that only the chief
makes; a save by all into one place corrupts it. So each worker writes, the others into a directory
of their own that is removed on every way out.
"""

import logging
import shutil
from pathlib import Path

from ctl.checkpoints import commit
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.retention import Keep
from ctl.errors import CheckpointError
from ctl.state import State

_log = logging.getLogger("ctl")


class ChiefOnlyCheckpoints:
    """Checkpoints in `directory/ckpt-<step>/`; all workers must see the same directory.

    >>> manager = ctl.ChiefOnlyCheckpoints("/tmp/m/checkpoints", keep=ctl.Keep(newest=3))
    """

    def __init__(self, directory, *, keep: Keep = Keep()):  # noqa: B008  frozen
        self.directory = Path(directory)
        self.keep = keep

    def save(self, state: State, manifest: Manifest) -> str | None:
        """Writes and commits; returns the path on the chief, None elsewhere."""
        if not state.placement.is_chief:
            self._take_part(state)
            return None
        path = commit.write(self.directory, manifest, state.checkpoint.write)
        self._delete_surplus()
        return str(path)

    def restore(self, state: State, step: int | None = None) -> Manifest | None:
        """Restores the newest undamaged checkpoint, or exactly that of `step`.

        A damaged one is passed over with a warning that names the file and the cause. Raises
        CheckpointError if all are damaged: never a silent start at step 0.
        """
        self._sweep(state)
        found = commit.scan(self.directory)
        damaged = [f"{p.name}: no readable manifest" for p in commit.uncommitted(self.directory)]
        if step is not None:
            found = [(p, m) for p, m in found if m.step == step]
        for path, manifest in reversed(found):
            fault = commit.verify(path, manifest)
            if fault is None:
                state.check_matches(manifest.variables, str(path))
                restore_state(state, path)
                return manifest
            damaged.append(f"{path.name}: {fault}")
            _log.warning("Passing over the damaged checkpoint %s: %s.", path, fault)
        if step is not None:
            raise CheckpointError(
                f"There is no good checkpoint of step {step} in {self.directory}; "
                f"there are {self.steps() or 'none'}."
            )
        if damaged:
            raise CheckpointError(
                f"Every checkpoint in {self.directory} is damaged ({'; '.join(damaged)}). Restore "
                "one from a backup, or start again with another --model_dir."
            )
        return None

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return [m.step for _, m in commit.scan(self.directory)]

    def _take_part(self, state: State) -> None:
        own = self.directory / f"workertemp_{state.placement.worker_index}"
        try:
            own.mkdir(parents=True, exist_ok=True)
            state.checkpoint.write(str(own / commit.STATE))
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def _sweep(self, state: State) -> None:
        if state.placement.is_chief:
            for name in commit.sweep(self.directory):
                _log.info("Removed %s, left by an interrupted save in %s.", name, self.directory)

    def _delete_surplus(self) -> None:
        found = commit.scan(self.directory)
        paths = {m.step: p for p, m in found}
        for manifest in self.keep.surplus([m for _, m in found]):
            try:
                commit.remove(paths[manifest.step])
            except OSError as e:
                _log.warning("Cannot delete the old checkpoint %s: %s.", paths[manifest.step], e)


def restore_state(state: State, path: Path) -> None:
    """Reads the tensors of a checkpoint directory into `state`; raises CheckpointError."""
    try:
        status = state.checkpoint.read(str(path / commit.STATE))
        status.assert_existing_objects_matched()
    except Exception as e:
        raise CheckpointError(f"The checkpoint {path} cannot be restored: {e}") from e
