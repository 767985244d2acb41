"""Temporary checkpoints that protect a run against interruptions."""

from typing import Any

from ctl.checkpoints import commit
from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints
from ctl.checkpoints.retention import Keep
from ctl.checkpoints.tracked_state import TrackedState
from ctl.io import paths


class BackupCheckpoints(ChiefOnlyCheckpoints):
    """A manager that keeps only the newest checkpoint, and deletes it when the run has succeeded.

    The same command resumes an interrupted run. Modelled on `keras.callbacks.BackupAndRestore`; an `Every`
    defines when to save.

    >>> ctl.fit(model, data, epochs=3, checkpoints=ctl.BackupCheckpoints("/tmp/backup"))

    Args:
      directory: A local path or a URL.
    """

    is_temporary = True

    def __init__(self, directory: Any) -> None:
        super().__init__(directory, keep=Keep(newest=1))

    def succeeded(self, state: TrackedState) -> None:
        """Deletes the backup, and its directory if it has no other files."""
        if not state.topology.is_chief:
            return
        for path, _ in commit.list_checkpoints(self.directory):
            commit.discard_directory(path)
        if self.directory.is_dir() and all(p.name == commit.LISTING for p in self.directory.iterdir()):
            paths.remove_tree(self.directory)
