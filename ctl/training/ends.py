"""The end of a run: its cause, and the error to raise."""

from ctl.errors import Stopped
from ctl.metrics.protocol import RunEnd
from ctl.supervision import signals
from ctl.training import error_translation
from ctl.training.prepared import PreparedTrainer


def precise_end(
    end: RunEnd, start: int, step: int, requested_steps: int | None, received: int | None = None
) -> RunEnd:
    """Returns the more precise cause of a loop that ended as SIGNAL, or as DONE with too few steps.

    Args:
      end: Cause for which the loop ended.
      start: Number of completed steps before the run.
      step: Number of completed steps after the run.
      requested_steps: Number of steps that the user requested, or None.
      received: `Interruption.received` of the run.
    """
    if end is RunEnd.SIGNAL and received == signals.TIME_LIMIT:
        return RunEnd.TIME_LIMIT
    if end is not RunEnd.DONE:
        return end
    if requested_steps is not None and step < requested_steps:
        return RunEnd.FEWER_DATA_THAN_STEPS
    return RunEnd.NO_STEPS_LEFT if step == start else end


def stopped_error(step: int, signal: int, *, can_resume: bool) -> Stopped:
    """Returns the error that ends a run after a signal."""
    after = "; the same command continues from there." if can_resume else "."
    return Stopped(
        f"Stopped by {signals.signal_name(signal)} at step {step}{after}", signals.exit_code(signal)
    )


def describe(error: BaseException) -> str:
    """Returns the class and the first line of an error, e.g. "ValueError: bad batch"."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def error_to_raise(error: BaseException, prepared: PreparedTrainer) -> BaseException:
    """Returns the error to raise for an error that ended a run: an explanation, or the same error."""
    return error_translation.explained(
        error,
        step=prepared.step,
        manager=prepared.checkpointing.manager,
        batch_size=prepared.config.global_batch_size,
        topology=prepared.world.topology,
        has_peers=prepared.world.has_peers,
    )
