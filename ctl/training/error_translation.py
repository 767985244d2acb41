"""TensorFlow's errors as ours, where we know better what they mean."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from ctl.collectives.failures import FAILURE_MARK
from ctl.data import pipeline
from ctl.distribute import parameter_servers
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.topology import Topology
from ctl.errors import CtlError, NonFiniteError, OutOfMemory, PeerLostError, UsageError
from ctl.step import finiteness
from ctl.training.trainer_protocol import TrainerProtocol

_OF_NCCL = (tf.errors.InternalError, tf.errors.UnknownError)  # what TensorFlow makes of its failures
_XLA = ("Detected unsupported operations when trying to compile", "XLA", "jit_compile")


def explained(
    error: BaseException, *, step: int, manager: Any, batch_size: int, topology: Topology, several: bool
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
    if isinstance(error, tf.errors.InvalidArgumentError) and pipeline.TOO_MANY_ROWS in text:
        return UsageError(
            f"Step {step + 1}: {pipeline.TOO_MANY_ROWS}, {batch_size}. Write "
            "dataset.batch(batch_size) with the batch_size that train_data is given."
        )
    if isinstance(error, tf.errors.OpError) and _XLA[0] in text:
        return UsageError(
            f"jit_compile: XLA cannot compile this train_step ({_first_line(text, _XLA)}). Leave "
            "--jit_compile out, or write the step without that operation."
        )
    return _of_a_peer(error, text, step) if several else error


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


def of_a_trace(error: Exception, batch: str) -> UsageError | None:
    """What is wrong in a user's step, and TensorFlow's text with their line; None if nobody knows.

    `batch`: what the step was given, for people.
    """
    text = str(error)
    known = (cure for words, cure in _CURES if all(word in text for word in words))
    cure = next(known, None)
    return None if cure is None else UsageError(f"{cure.format(batch=batch)}\n{_of_the_user(text)}")


def _of_the_user(text: str) -> str:
    """AutoGraph's text without the frames of libraries: `  File "...", line n, in f`, and its line."""
    lines, kept, skips = [line for line in text.splitlines() if line.strip()], [], False
    for line in lines:
        if line.lstrip().startswith("File "):
            skips = any(place in line for place in _LIBRARIES)
        elif skips:  # the line that a frame shows
            skips = False
            continue
        if not skips:
            kept.append(line[:_LONGEST])
    return "\n".join(kept)


_LIBRARIES = ("site-packages", os.path.dirname(os.path.dirname(__file__)))
_LONGEST = 300  # letters of a line
_NO_VALUES = (
    "A step is traced once into a graph, in which tensors have no values yet, so .numpy() and NumPy cannot "
    "read them. Use TensorFlow's functions, tf.print(...) to look at a value, self.log(name, value) to "
    "report one; or read it in a hook such as after_loop."
)
_VARIABLES = (
    "The step makes variables: a tf.Variable, a layer, an optimizer or a metric. Make them in build(), as "
    "attributes of self, and use them in the step."
)
_NEW_TO_OPTIMIZER = (
    "The optimizer was built without a variable that is trained now, such as one of a frozen layer. "
    "Build it for all of them in build(), before you freeze any: "
    "self.optimizer.build(self.model.trainable_variables)."
)
_CURES = (
    (("has no attribute 'numpy'",), _NO_VALUES),
    (("Cannot convert a symbolic",), _NO_VALUES),
    (("NumPy", "symbolic"), _NO_VALUES),
    (("only supports singleton tf.Variables",), _VARIABLES),
    (("transitively on placeholder",), _VARIABLES),
    (("tried to create variables on non-first call",), _VARIABLES),
    (
        ("float64", "float32"),
        "Numbers of 64 and of 32 bits meet in the step, which TensorFlow does not mix. NumPy makes "
        "float64: write array.astype('float32') in train_data or eval_data, or tf.cast(value, "
        "tf.float32) in the step. The batch is {batch}.",
    ),
    (("Unknown variable", "built with"), _NEW_TO_OPTIMIZER),
    (("cannot recognize variable",), _NEW_TO_OPTIMIZER),
    (
        ("Iterating over a symbolic",),
        "The step takes a tensor apart as if it were several. The batch is {batch}: does it have the parts "
        "that the step expects, and is the dataset batched?",
    ),
)


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


def newest_step_phrase(manager: Any) -> str:
    """Which checkpoint is the newest, as part of a sentence."""
    kept: list[int] = getattr(manager, "steps", list)()
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
