"""`keras.callbacks.BackupAndRestore` in `ctl.fit`, as `ctl.BackupCheckpoints`.

The checkpoints of `ctl` also hold the position in the data, so a resumed run continues exactly.
"""

from typing import Any, NamedTuple

from ctl.checkpoints.backup import BackupCheckpoints
from ctl.checkpoints.protocol import CheckpointManager
from ctl.errors import UsageError
from ctl.keras.callbacks import is_of_keras, listed_callbacks


class SaveOptions(NamedTuple):
    """Options of `ctl.fit` about checkpoints."""

    model_dir: str | None
    checkpoints: CheckpointManager | None
    save_every_steps: int | None


def replace_backup_callback(callbacks: Any, options: SaveOptions) -> tuple[Any, SaveOptions]:
    """Returns the callbacks without a `BackupAndRestore`, and options that save as it does.

    Raises UsageError if the options or the arguments of the callback do not permit that.
    """
    listed = listed_callbacks(callbacks)
    backups = [c for c in listed if is_of_keras(c, "BackupAndRestore")]
    if not backups:
        return callbacks, options
    backup = backups[0]
    conditions = {
        "one callback of the class itself": len(backups) == 1
        and type(backup).__module__.startswith("keras."),
        "delete_checkpoint=True (or model_dir=... in its place)": backup.delete_checkpoint,
        'save_freq="epoch" or a number of batches': backup.save_freq,
        "no model_dir, checkpoints or save_every_steps beside it": options == SaveOptions(None, None, None),
    }
    unmet = [condition for condition, is_met in conditions.items() if not is_met]
    if unmet:
        raise UsageError(
            f"callbacks has a {type(backup).__name__}, which ctl.fit executes as checkpoints="
            f"ctl.BackupCheckpoints({str(backup.backup_dir)!r}); expected {' and '.join(unmet)}."
        )
    steps = None if backup.save_freq == "epoch" else int(backup.save_freq)
    remaining = [c for c in listed if c is not backup]
    return remaining, SaveOptions(None, BackupCheckpoints(backup.backup_dir), steps)
