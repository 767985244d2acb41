"""Errors of collectives in graphs, with the types they have outside.

A node that calls Python tells TensorFlow no more than a text, and TensorFlow raises UnknownError. Where
TensorFlow turns statuses of functions and sessions into exceptions, ours get their own types back.
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
    """The error of a collective that TensorFlow made another of; other errors as they are."""
    found = _OURS.search(str(error)) if isinstance(error, tf.errors.OpError) else None
    if found is None or isinstance(error, LostRankError):
        return error
    kind, text = found.groups()
    if kind not in _TYPES:
        return LostRankError(text)
    node, op = getattr(error, "node_def", None), getattr(error, "op", None)
    return _TYPES[kind](node, op, text)


def install_graph_errors() -> None:
    """From here on; a TensorFlow that has these places no more raises its own types.

    Errors that pass elsewhere, such as through the elements of a dataset, end the process with the exit
    code of their own type.
    """
    exit_hook.translate_errors(with_own_type)
    graph_call_errors.translate_graph_errors(with_own_type)
