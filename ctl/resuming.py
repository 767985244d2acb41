"""What is checked when a run goes on: the same checkpoint on every worker, the same order of data."""

import logging
from collections.abc import Callable
from typing import Any

from ctl import causes, parameter_servers
from ctl.agreement import Agreement
from ctl.batches import Batches
from ctl.checkpoints.protocol import Manifest
from ctl.errors import NonFiniteError, UsageError
from ctl.reports.protocol import Started

_log = logging.getLogger("ctl")


def warn_of_another_order(trainer: Any, resumed: Manifest) -> None:
    """Says that the data will come in another order than in the part of the run that was restored."""
    before = resumed.data.get("seed"), resumed.world.get("global_batch_size")
    now = trainer.seed, trainer.global_batch_size
    if trainer.placement.is_chief and None not in before and before != now:
        _log.warning(
            "The checkpoint was made with seed %s and global_batch_size %s, this run has %s and %s: "
            "examples come in another order than in an unbroken run.", *before, *now,
        )  # fmt: skip


def same_everywhere(agreement: Agreement, place, step: int) -> None:
    total = agreement.sum([float(step), float(step) if place.is_chief else 0.0])
    if total[0] != total[1] * agreement.num_workers:
        raise UsageError(
            f"Worker {place.worker_index} found the newest checkpoint at step {step}, the chief at "
            f"step {int(total[1])}. All workers must see the same model_dir: put it on shared storage."
        )


_ROLLBACKS = 3  # to one checkpoint


def rolling_back(trainer: Any, session: Any, batches: Batches) -> Callable[[int], Manifest] | None:
    """What takes the run from a step back to its newest checkpoint, if that is wanted.

    Raises UsageError where it could not.
    """
    wanted = trainer.gradients.on_nonfinite == "rollback" or getattr(trainer.spike, "rollback", False)
    if not wanted:
        return None
    if parameter_servers.is_used(trainer.strategy):
        raise UsageError(
            "rollback needs workers in step, and those of parameter servers go at their own speed. Write "
            "on_nonfinite='skip' or 'stop' (--on_nonfinite)."
        )
    if hasattr(trainer, "train_data_fn"):
        raise UsageError(
            "rollback skips the data of the steps that it takes back, which train_data_fn cannot. Write "
            "train_data, with global batches, or on_nonfinite='skip'."
        )

    def roll_back(step: int) -> Manifest:
        session.advance(step, trainer.global_batch_size, batches.examples)
        manifest = _roll_back(trainer, session, step)
        if session.running is not None:
            note = Started(manifest.step, None, session.info, f"going back from step {step}")
            session.running.note(note)
        return manifest

    return roll_back


def _roll_back(trainer: Any, session: Any, step: int) -> Manifest:
    """Restores the newest checkpoint; the data go on where they are. Raises NonFiniteError if it cannot."""
    manifest = session.manager.restore(session.state)
    if manifest is None:
        raise NonFiniteError(
            f"Step {step}: there is no checkpoint to go back to. Save more often (--save_every_steps), or "
            "write --on_nonfinite=skip."
        )
    back = manifest.step
    count = session.rollbacks[back] = session.rollbacks.get(back, 0) + 1
    if count > _ROLLBACKS:
        raise NonFiniteError(
            f"Step {step}: went back {_ROLLBACKS} times to the checkpoint of step {back}, each time with "
            f"other data, and it was of no use; {causes.newest(session.manager)}. Lower the learning rate."
        )
    session.at = back
    session.watching.restore(manifest.state.get("watchers", {}))
    if trainer.placement.is_chief:
        _log.warning(
            "Step %d: going back to the checkpoint of step %d, and on with the next data: the %d "
            "examples since then are skipped (%d of %d times).",
            step, back, (step - back) * trainer.global_batch_size, count, _ROLLBACKS,
        )  # fmt: skip
    return manifest
