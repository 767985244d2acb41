"""What is checked when a run goes on: the same checkpoint on every worker, the same order of data."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ctl import causes, lease, parameter_servers
from ctl.agreement import Agreement
from ctl.batches import Batches
from ctl.checkpoints.protocol import Manifest
from ctl.errors import NonFiniteError, UsageError
from ctl.reports.protocol import Started

_log = logging.getLogger("ctl")


def claim(trainer: Any) -> None:
    """Raises UsageError while another job trains in the trainer's model_dir."""
    if trainer.placement.is_chief:
        lease.claim(trainer.model_dir)


_MAY_DIFFER = ("workers", "replicas", "strategy", "tensorflow", "ctl")  # the numbers stay equal


def check_configuration(
    trainer: Any, resumed: Manifest | None, batches: Batches, config: Mapping[str, Any]
) -> None:
    """Shows what differs from the run that is resumed; raises UsageError where data come in another order.

    Unless `trainer.allow_config_change`. Another number of workers is no difference: the global batches
    stay the same.
    """
    if resumed is None:
        return
    before = {
        "seed": resumed.data.get("seed"),
        "global_batch_size": resumed.world.get("global_batch_size"),
        "train_data": resumed.data.get("source") if batches.certain else None,
    }
    now = {
        "seed": trainer.seed,
        "global_batch_size": trainer.global_batch_size,
        "train_data": batches.description,
    }
    order = [k for k in before if before[k] is not None and before[k] != now[k]]
    lines = [f"  {k}: {before[k]} before, {now[k]} now" for k in order]
    if lines and not trainer.allow_config_change:
        raise UsageError(
            f"The checkpoint of step {resumed.step} was made with other settings: from here on, examples "
            "would come in another order than in an unbroken run.\n" + "\n".join(lines)
            + "\nGive the settings of before, another --model_dir, or --allow_config_change."
        )  # fmt: skip
    old = resumed.config
    others = [k for k in config if old and k not in (*before, *_MAY_DIFFER) and old.get(k) != config[k]]
    lines += [f"  {k}: {old.get(k, 'nothing')} before, {config[k]} now" for k in others]
    if lines and trainer.placement.is_chief:
        _log.warning("Other settings than at step %d:\n%s", resumed.step, "\n".join(lines))


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
    if hasattr(session.manager, "finish"):
        session.manager.finish()  # a save in the background
    session.agreement.sum([0.0])  # from here on every worker finds the same checkpoints
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
