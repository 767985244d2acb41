"""The end of a run: its cause, the error to raise, and the export."""

from ctl.distribute import parameter_servers
from ctl.errors import Stopped
from ctl.metrics.protocol import RunEnd
from ctl.supervision import signals
from ctl.training import error_translation
from ctl.training.session import Session
from ctl.training.trainer_protocol import TrainerProtocol


def precise_end(end: RunEnd, start: int, step: int, requested_steps: int | None) -> RunEnd:
    """Returns the more precise cause of a loop that ended as DONE with fewer steps than requested, or none.

    Args:
      end: Cause for which the loop ended.
      start: Number of completed steps before the run.
      step: Number of completed steps after the run.
      requested_steps: Number of steps that the user requested, or None.
    """
    if end is not RunEnd.DONE:
        return end
    if requested_steps is not None and step < requested_steps:
        return RunEnd.FEWER_DATA_THAN_STEPS
    return RunEnd.NO_STEPS_LEFT if step == start else end


def export_at_end(trainer: TrainerProtocol, session: Session, formats: tuple) -> list[str]:
    """Exports the model while this run holds the lease of model_dir; returns the paths."""
    if session.lease is not None:
        session.lease.check_now()
    return trainer.export(*formats) if formats else []


def stopped_error(trainer: TrainerProtocol, step: int, signal: int) -> Stopped:
    """Returns the error that ends a run after a signal."""
    after = "; the same command continues from there." if trainer.model_dir else "."
    return Stopped(
        f"Stopped by {signals.signal_name(signal)} at step {step}{after}", signals.exit_code(signal)
    )


def error_to_raise(error: BaseException, trainer: TrainerProtocol, session: Session) -> BaseException:
    """Returns the error to raise for an error that ended a run: an explanation, or the same error."""
    topology = trainer.topology
    return error_translation.explained(
        error,
        step=session.step,
        manager=session.manager,
        batch_size=trainer.global_batch_size,
        topology=topology,
        has_peers=topology.num_workers > 1 or parameter_servers.is_used(trainer.strategy),
    )
