"""TensorFlow's errors as ours, where we know better what they mean."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from ctl.checkpoints.protocol import CheckpointManager
from ctl.collectives.failures import FAILURE_MARK
from ctl.data import input_errors, pipeline
from ctl.distribute import parameter_servers
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.topology import Topology
from ctl.errors import CtlError, NonFiniteError, OutOfMemory, PeerLostError, UsageError
from ctl.step import finiteness
from ctl.training import step_mistakes
from ctl.training.trainer_protocol import TrainerProtocol

_OF_NCCL = (tf.errors.InternalError, tf.errors.UnknownError)  # what TensorFlow makes of its failures
_XLA = ("Detected unsupported operations when trying to compile", "XLA", "jit_compile")


def explained(
    error: BaseException,
    *,
    step: int,
    manager: CheckpointManager,
    batch_size: int,
    topology: Topology,
    several: bool,
) -> BaseException:
    """The error to raise for `error`, which came after `step` completed steps; often the same.

    `several` says that other processes take part.
    """
    text = str(error)
    if isinstance(error, tf.errors.InvalidArgumentError) and finiteness.MESSAGE in text:
        who = finiteness.described(text, topology.num_replicas, topology.num_workers)
        local = finiteness.AT_AVERAGE in text
        what = f"By step {step}" if local else f"Step {step + 1}"
        done = "" if local else "The step was not applied; "
        newest = newest_step_phrase(manager)
        back = ", --on_nonfinite=rollback goes back to the checkpoint and on with other data"
        return NonFiniteError(
            f"{what}: {who}. {done}{newest if done else newest.capitalize()}. Look at "
            "the loss for logarithms and divisions, lower the learning rate, or clip with self.gradients = "
            "ctl.Gradients(clip_norm=1.0). --on_nonfinite=skip leaves such steps out"
            f"{'' if local else back}."
        )
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)) and "No space" not in text:
        return OutOfMemory(
            f"Step {step + 1}: out of memory ({_first_line(text, _MEMORY_WORDS)}). global_batch_size is "
            f"{batch_size}, {-(-batch_size // topology.num_replicas)} on each of {topology.num_replicas} "
            f"replicas; {newest_step_phrase(manager)}. Try a smaller --global_batch_size, or "
            "self.gradients = ctl.Gradients(accumulate_steps=2), which splits a replica's batch; on GPUs "
            "also TF_FORCE_GPU_ALLOW_GROWTH=true where others use the device."
        )
    of_rows = _of_rows(text, batch_size, topology)
    if isinstance(error, tf.errors.InvalidArgumentError) and of_rows:
        return UsageError(f"Step {step + 1}: {of_rows}")
    if isinstance(error, tf.errors.OpError) and _XLA[0] in text:
        return UsageError(
            f"jit_compile: XLA cannot compile this train_step ({_first_line(text, _XLA)}). Leave "
            "--jit_compile out, or write the step without that operation."
        )
    translated = _of_a_peer(error, text, step) if several else error
    if translated is error and isinstance(error, tf.errors.OpError):
        known = input_errors.explain_input_error(error, "train_data")
        known = known or step_mistakes.explain_step_error(error, "one of train_data")
        return error if known is None else UsageError(f"After step {step}: {known}")
    return translated


def _of_rows(text: str, batch_size: int, topology: Topology) -> str:
    """Returns the explanation of a batch whose rows cannot be used, or an empty string."""
    if pipeline.TOO_MANY_ROWS in text:
        return (
            f"{pipeline.TOO_MANY_ROWS}, {batch_size}. Write dataset.batch(batch_size) with the batch_size "
            "that train_data is given."
        )
    if pipeline.UNEQUAL_ROWS in text:
        return (
            f"{text[text.index(pipeline.UNEQUAL_ROWS) :].partition(']')[0]}, and each of "
            f"{topology.num_replicas} replicas gets its share of the rows of every component. Give all "
            "components one row per example, or train on one device."
        )
    return ""


@contextlib.contextmanager
def peer_errors(trainer: TrainerProtocol) -> Iterator[None]:
    """Translates errors of lost peers before and after the steps of a run, e.g. while a model is built."""
    try:
        yield
    except Exception as e:
        topology = trainer.topology
        if topology.num_workers < 2 and not parameter_servers.is_used(trainer.strategy):
            raise
        error = _of_a_peer(e, str(e), trainer.step)
        if error is e:
            raise
        raise error from e


def translates_peer_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function of a trainer with `peer_errors`."""

    @functools.wraps(function)
    def with_translation(trainer: TrainerProtocol, *args: Any, **kwargs: Any) -> Any:
        with peer_errors(trainer):
            return function(trainer, *args, **kwargs)

    return with_translation


def _of_a_peer(error: BaseException, text: str, step: int) -> BaseException:
    """PeerLostError where another task is the cause; else the same error."""
    if isinstance(error, PEER_ERRORS):
        return PeerLostError(
            f"Step {step}: another task is gone or cannot be reached "
            f"({_first_line(text.replace(FAILURE_MARK, ''), _PEER_WORDS)}). Its own log tells why."
        )
    if isinstance(error, tf.errors.FailedPreconditionError) and FAILURE_MARK in text:
        said = text.partition(FAILURE_MARK)[2]
        return UsageError(
            f"Step {step}: {said} Workers (ranks) must sum the same things in the same order; "
            "--check_collectives names the line on each worker."
        )
    words = text.lower()
    if isinstance(error, _OF_NCCL) and "nccl" in words and "invalid" not in words:
        return PeerLostError(
            f"Step {step}: NCCL failed ({_first_line(text, ('NCCL', 'nccl'))}). Most often another task "
            "is gone or a network failed; NCCL_DEBUG=INFO and the other logs tell more."
        )
    return error


def newest_step_phrase(manager: CheckpointManager) -> str:
    """Which checkpoint is the newest, as part of a sentence."""
    kept = manager.steps()
    return f"the newest checkpoint is of step {kept[-1]}" if kept else "no checkpoint was saved"


_MEMORY_WORDS = ("OOM", "out of memory", "llocat", "memory")
_PEER_WORDS = ("aborted", "reset by peer", "closed", "unhealthy", "timed out", "failed to connect")


def _first_line(text: str, words: tuple[str, ...]) -> str:
    """The first line of a TensorFlow error with one of `words`; it is more than a heading."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    known = [line for line in lines if any(word in line for word in words)]
    return (known or lines or [""])[0][:200]


def ours(error: BaseException | None) -> CtlError | None:
    """The error of `ctl` in a chain of errors, or None."""
    while error is not None and not isinstance(error, CtlError):
        error = error.__cause__ or error.__context__
    return error
