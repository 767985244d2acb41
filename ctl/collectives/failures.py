"""Exceptions of collectives, with the types that Horovod scripts catch."""

from typing import Any

import tensorflow as tf
from ctl.collectives import contents
from ctl.collectives.errors import FAILURE_MARK, HorovodInternalError


class LostRankError(HorovodInternalError, tf.errors.UnknownError):
    """Error after the loss of a rank or a shutdown. It has both types that Horovod scripts catch.

    Args:
      *arguments: The message, or `(node_def, op, message[, error_code])` as in TensorFlow's errors. Keras
        creates a new error with these arguments to add the name of the layer to the message.
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


def create_exception(code: str, text: str) -> Exception:
    """Creates the exception for an error code of `requests`, or for "LOST"."""
    message = FAILURE_MARK + text + contents.describe_tensors(text)
    error_class = _TYPES.get(code)
    return LostRankError(message) if error_class is None else error_class(None, None, message)
