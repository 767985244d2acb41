"""Implementation of `Trainer.save` and `Trainer.restore`."""

from ctl.errors import UsageError
from ctl.training import run_metadata
from ctl.training.prepared import PreparedTrainer
from ctl.training.run_options import RunOptions


def save_now(prepared: PreparedTrainer, options: RunOptions) -> str | None:
    """Saves a checkpoint now, or within a run at the end of the loop.

    Returns:
      The path, on the chief outside of a run; else None.

    Raises:
      UsageError: Without checkpoints, or in an evaluator process.
    """
    checkpointing, activity = prepared.checkpointing, prepared.activity
    if not checkpointing.can_save:
        raise UsageError(
            "save() has no directory for checkpoints. Give the trainer a model_dir, or checkpoints=..."
        )
    if prepared.world.topology.evaluates:
        raise UsageError("save() was called in an evaluator task, which only reads checkpoints.")
    if activity.run is not None:
        activity.save_request.submit()
        return None
    written: list[str] = []
    with prepared.peer_errors():
        configuration = run_metadata.plain_configuration(prepared, options)
        with checkpointing.opened(lambda step, path: written.append(path)):
            path = checkpointing.save(prepared.step, configuration)
        prepared.world.wait_for_all_workers()  # until the chief has written
    return path or next(iter(written), None)


def restore_from(prepared: PreparedTrainer, path: str) -> int:
    """Restores the checkpoint at `path`. Returns its step, equal on all workers."""
    if prepared.activity.run is not None:
        raise UsageError("restore() was called during a run; call it before train().")
    with prepared.peer_errors():
        manifest = prepared.checkpointing.restore_from(path)
        prepared.resume(manifest)
    return manifest.step
