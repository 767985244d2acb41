"""Translation of TensorFlow's errors to errors of ctl with an explanation."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf
from ctl.checkpoints.protocol import CheckpointManager
from ctl.collectives.errors import FAILURE_MARK
from ctl.data import input_errors
from ctl.data.row_checks import TOO_MANY_ROWS, UNEQUAL_ROWS
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.topology import Topology
from ctl.distribute.world import World
from ctl.errors import NonFiniteError, OutOfMemory, PeerLostError, UsageError
from ctl.step import finiteness, step_mistakes

_NCCL_ERRORS = (tf.errors.InternalError, tf.errors.UnknownError)
_XLA = ("Detected unsupported operations when trying to compile", "XLA", "jit_compile")


def explained(
    error: BaseException,
    *,
    step: int,
    manager: CheckpointManager,
    batch_size: int,
    topology: Topology,
    has_peers: bool,
) -> BaseException:
    """Returns the error to raise for an error in a run: an explanation, or the same error.

    Args:
      error: Error to explain.
      step: Number of completed steps.
      manager: Checkpoint manager, for the newest step.
      batch_size: Global batch size.
      topology: Topology of the job.
      has_peers: True if other processes take part.
    """
    text = str(error)
    if isinstance(error, tf.errors.InvalidArgumentError) and finiteness.MESSAGE in text:
        description = finiteness.described(text, topology.num_replicas, topology.num_workers)
        is_local = finiteness.AT_AVERAGE in text
        when = f"By step {step}" if is_local else f"Step {step + 1}"
        effect = "" if is_local else "The step was not applied; "
        newest = newest_step_phrase(manager)
        rollback = ", --on_nonfinite=rollback returns to the checkpoint and continues with other data"
        return NonFiniteError(
            f"{when}: {description}. {effect}{newest if effect else newest.capitalize()}. Look at "
            "the loss for logarithms and divisions, lower the learning rate, or clip with self.gradients = "
            "ctl.Gradients(clip_norm=1.0). --on_nonfinite=skip leaves such steps out"
            f"{'' if is_local else rollback}."
        )
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)) and "No space" not in text:
        return OutOfMemory(
            f"Step {step + 1}: out of memory ({_first_line(text, _MEMORY_WORDS)}). global_batch_size is "
            f"{batch_size}, {-(-batch_size // topology.num_replicas)} on each of {topology.num_replicas} "
            f"replicas; {newest_step_phrase(manager)}. Try a smaller --global_batch_size, or "
            "self.gradients = ctl.Gradients(accumulate_steps=2), which splits a replica's batch; on GPUs "
            "also TF_FORCE_GPU_ALLOW_GROWTH=true where others use the device."
        )
    row_error = _explain_rows(text, batch_size, topology)
    if isinstance(error, tf.errors.InvalidArgumentError) and row_error:
        return UsageError(f"Step {step + 1}: {row_error}")
    if isinstance(error, tf.errors.OpError) and _XLA[0] in text:
        return UsageError(
            f"jit_compile: XLA cannot compile this train_step ({_first_line(text, _XLA)}). Leave "
            "--jit_compile out, or write the step without that operation."
        )
    translated = _translate_peer_error(error, text, step) if has_peers else error
    if translated is error and isinstance(error, tf.errors.OpError):
        explanation = input_errors.explain_input_error(error, "train_data")
        explanation = explanation or step_mistakes.explain_step_error(error, "one of train_data")
        return error if explanation is None else UsageError(f"After step {step}: {explanation}")
    return translated


def _explain_rows(text: str, batch_size: int, topology: Topology) -> str:
    """Returns the explanation of an invalid number of rows in a batch, or an empty string."""
    if TOO_MANY_ROWS in text:
        return (
            f"{TOO_MANY_ROWS}, {batch_size}. Write dataset.batch(batch_size) with the batch_size "
            "that train_data is given."
        )
    if UNEQUAL_ROWS in text:
        return (
            f"{text[text.index(UNEQUAL_ROWS) :].partition(']')[0]}, and each of "
            f"{topology.num_replicas} replicas gets its share of the rows of every component. Give all "
            "components one row per example, or train on one device."
        )
    return ""


@contextlib.contextmanager
def peer_errors(world: World, read_step: Callable[[], int]) -> Iterator[None]:
    """Translates errors of lost peers before and after the steps of a run, e.g. while a model is built.

    Args:
      world: Processes of the job.
      read_step: Returns the number of completed steps, for the message.
    """
    try:
        yield
    except Exception as e:
        if not world.has_peers:
            raise
        error = _translate_peer_error(e, str(e), read_step())
        if error is e:
            raise
        raise error from e


def _translate_peer_error(error: BaseException, text: str, step: int) -> BaseException:
    """Returns PeerLostError if another task is the cause, else the same error."""
    if isinstance(error, PEER_ERRORS):
        return PeerLostError(
            f"Step {step}: another task has ended or cannot be reached "
            f"({_first_line(text.replace(FAILURE_MARK, ''), _PEER_WORDS)}). See the log of that worker."
        )
    if isinstance(error, tf.errors.FailedPreconditionError) and FAILURE_MARK in text:
        message = text.partition(FAILURE_MARK)[2]
        return UsageError(
            f"Step {step}: {message} Workers (ranks) must run the same sums in the same order; "
            "--check_collectives names the line on each worker."
        )
    lower_text = text.lower()
    if isinstance(error, _NCCL_ERRORS) and "nccl" in lower_text and "invalid" not in lower_text:
        return PeerLostError(
            f"Step {step}: NCCL failed ({_first_line(text, ('NCCL', 'nccl'))}). Usually another task has "
            "ended or the network has failed. Read the logs of all workers, or set NCCL_DEBUG=INFO."
        )
    return error


def newest_step_phrase(manager: CheckpointManager) -> str:
    """Returns a clause about the newest checkpoint."""
    steps = manager.steps()
    return f"the newest checkpoint is of step {steps[-1]}" if steps else "no checkpoint was saved"


_MEMORY_WORDS = ("OOM", "out of memory", "llocat", "memory")
_PEER_WORDS = ("aborted", "reset by peer", "closed", "unhealthy", "timed out", "failed to connect")


def _first_line(text: str, substrings: tuple[str, ...]) -> str:
    """Returns the first line of a TensorFlow error that contains one of `substrings`, or the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    matching = [line for line in lines if any(s in line for s in substrings)]
    return (matching or lines or [""])[0][:200]
