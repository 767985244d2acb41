"""Conversion of collectives' errors in graphs to the types that they have in eager calls.

A node that calls Python passes only a message to TensorFlow, which raises UnknownError. The conversion
runs where TensorFlow creates exceptions from the status of functions and sessions.
"""

import re
from typing import Any

import tensorflow as tf
from ctl.collectives.failures import FAILURE_MARK, LostRankError
from ctl.io import exit_hook
from ctl.tensorflow_patches import graph_call_errors

_TYPES: dict[str, Any] = {
    "FailedPreconditionError": tf.errors.FailedPreconditionError,
    "InvalidArgumentError": tf.errors.InvalidArgumentError,
}
_OURS = re.compile(rf"(\w+): ({re.escape(FAILURE_MARK)}.*?)(?:\n+Traceback|\n\n|$)", re.DOTALL)


def with_own_type(error: Exception) -> Exception:
    """Returns the original error of a collective. Errors of other operations are returned unchanged."""
    found = _OURS.search(str(error)) if isinstance(error, tf.errors.OpError) else None
    if found is None or isinstance(error, LostRankError):
        return error
    kind, text = found.groups()
    if kind not in _TYPES:
        return LostRankError(text)
    node, op = getattr(error, "node_def", None), getattr(error, "op", None)
    return _TYPES[kind](node, op, text)


def install_graph_errors() -> None:
    """Installs the conversion. Versions of TensorFlow without these functions raise their own types.

    Errors on other paths, such as through the elements of a dataset, end the process with the exit code of
    the original type.
    """
    exit_hook.translate_errors(with_own_type)
    graph_call_errors.translate_graph_errors(with_own_type)
