"""Exceptions of collectives, with the types that scripts for Horovod catch."""

from typing import Any

import tensorflow as tf
from ctl.collectives import contents
from ctl.collectives.errors import HorovodInternalError

FAILURE_MARK = "ctl.hvd: "  # prefix of messages, to find them in TensorFlow's errors


class LostRankError(HorovodInternalError, tf.errors.UnknownError):
    """Error after the loss of a rank or a shutdown. It has both types that scripts for Horovod catch.

    Args:
      arguments: The message, or `(node_def, op, message[, error_code])` as in TensorFlow's errors: Keras
        creates such an error again to add the name of the layer to its message.
    """

    def __init__(self, *arguments: Any):
        node_def, op, message, *_ = arguments if len(arguments) > 1 else (None, None, *arguments)
        tf.errors.UnknownError.__init__(self, node_def, op, message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,)  # nodes cannot be pickled

    def __str__(self) -> str:
        return self.message


_TYPES = {
    "FAILED_PRECONDITION": tf.errors.FailedPreconditionError,
    "INVALID_ARGUMENT": tf.errors.InvalidArgumentError,
}


def failure(code: str, text: str) -> Exception:
    """Returns the exception for a code of `requests`, or for "LOST"."""
    made = _TYPES.get(code)
    text += contents.said(text)
    return LostRankError(FAILURE_MARK + text) if made is None else made(None, None, FAILURE_MARK + text)
