"""Why a run failed: TensorFlow's errors in the words of `ctl`."""

from typing import Any

import tensorflow as tf
from ctl import data, gradients, parameter_servers
from ctl.errors import NonFiniteError, PeerLostError, UsageError

PEER_ERRORS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError,
               tf.errors.CancelledError)  # fmt: skip


def explained(error: BaseException, trainer: Any, session: Any) -> BaseException:
    """TensorFlow's error as one of ours where we know better; else the error itself."""
    text = str(error)
    if isinstance(error, tf.errors.InvalidArgumentError) and gradients.NON_FINITE_MESSAGE in text:
        kept: list[int] = getattr(session.manager, "steps", list)()
        newest = (
            f"the newest checkpoint is of step {kept[-1]}" if kept else "no checkpoint was saved"
        )
        return NonFiniteError(
            f"Step {session.step + 1}: the gradient norm is NaN or infinite. The step was not "
            f"applied; {newest}. Look at the loss for logarithms and divisions, lower the learning "
            "rate, or clip with self.gradients = ctl.Gradients(clip_norm=1.0)."
        )
    if isinstance(error, tf.errors.InvalidArgumentError) and data.TOO_MANY_ROWS in text:
        return UsageError(
            f"Step {session.step + 1}: {data.TOO_MANY_ROWS}, {trainer.global_batch_size}. Write "
            "dataset.batch(batch_size) with the batch_size that train_data is given."
        )
    several = trainer.placement.num_workers > 1 or parameter_servers.is_used(trainer.strategy)
    if several and isinstance(error, PEER_ERRORS):
        return PeerLostError(
            f"Step {session.step}: another task is gone or cannot be reached "
            f"({_first_telling_line(text)}). Its own log tells why."
        )
    return error


def _first_telling_line(text: str) -> str:
    """The first line of a TensorFlow error that is more than a heading."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling_words = (
        "aborted",
        "reset by peer",
        "closed",
        "unhealthy",
        "timed out",
        "failed to connect",
    )
    known = [line for line in lines if any(word in line for word in telling_words)]
    return (known or lines or [""])[0][:200]
