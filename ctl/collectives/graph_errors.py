"""Conversion of the errors of collectives in graphs to the types that eager calls raise.

A node that calls Python passes only a message to TensorFlow, which raises UnknownError. The conversion
runs where TensorFlow creates exceptions from the status of functions and sessions.
"""

import re
from typing import Any

import tensorflow as tf
from ctl.collectives.errors import FAILURE_MARK
from ctl.collectives.failures import LostRankError
from ctl.io import exit_hook
from ctl.tensorflow_patches import graph_call_errors

_TYPES: dict[str, Any] = {
    "FailedPreconditionError": tf.errors.FailedPreconditionError,
    "InvalidArgumentError": tf.errors.InvalidArgumentError,
}
_COLLECTIVE_ERROR = re.compile(rf"(\w+): ({re.escape(FAILURE_MARK)}.*?)(?:\n+Traceback|\n\n|$)", re.DOTALL)


def restore_error_type(error: Exception) -> Exception:
    """Returns the original error of a collective. Errors of other operations are returned unchanged."""
    match = _COLLECTIVE_ERROR.search(str(error)) if isinstance(error, tf.errors.OpError) else None
    if match is None or isinstance(error, LostRankError):
        return error
    type_name, message = match.groups()
    if type_name not in _TYPES:
        return LostRankError(message)
    node, op = getattr(error, "node_def", None), getattr(error, "op", None)
    return _TYPES[type_name](node, op, message)


def install_graph_errors() -> None:
    """Installs the conversion. Versions of TensorFlow without these functions raise UnknownError.

    Errors on other paths, for example those of a dataset's elements, keep their type. The process then ends
    with the exit code of the original type.
    """
    exit_hook.translate_errors(restore_error_type)
    graph_call_errors.translate_graph_errors(restore_error_type)
