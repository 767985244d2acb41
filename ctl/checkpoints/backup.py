"""A backup against interruption: one checkpoint, deleted when the run is complete."""

from typing import Any

from ctl.checkpoints import commit
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.checkpoints.retention import Keep
from ctl.checkpoints.tracked_state import TrackedState
from ctl.io import paths


class BackupCheckpoints(ChiefOnlyCheckpoints):
    """Keeps the newest state until the run succeeds. The same command resumes an interrupted run.

    >>> ctl.fit(model, data, epochs=3, checkpoints=ctl.BackupCheckpoints("/tmp/backup"))

    Modelled on `keras.callbacks.BackupAndRestore`; when to save is an `Every`.
    """

    is_temporary = True

    def __init__(self, directory: Any) -> None:
        super().__init__(directory, keep=Keep(newest=1))

    def succeeded(self, state: TrackedState) -> None:
        """Deletes the backup, and its directory if it has no other files."""
        if not state.topology.is_chief:
            return
        for path, _ in commit.scan(self.directory):
            commit.discard(path)
        if self.directory.is_dir() and all(p.name == commit.NOTE for p in self.directory.iterdir()):
            paths.remove_tree(self.directory)
