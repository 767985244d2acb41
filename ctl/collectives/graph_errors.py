"""Errors of collectives in graphs, with the types they have outside.

A node that calls Python tells TensorFlow no more than a text, and TensorFlow raises UnknownError. Where
TensorFlow turns statuses of functions and sessions into exceptions, ours get their own types back.
"""

import functools
import re
from typing import Any

import tensorflow as tf
from ctl.collectives.failures import FAILURE_MARK, LostRankError
from ctl.io import exit_hook

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
    from tensorflow.python.client import session
    from tensorflow.python.eager import context

    places: list[tuple[Any, str]] = [
        (getattr(context, "Context", None), "call_function"),
        (getattr(session, "BaseSession", None), "_do_call"),
    ]
    for kind, method in places:
        call = getattr(kind, method, None)
        if call is not None and not hasattr(call, "_of_hvd"):
            setattr(kind, method, _raising(call))


def _raising(call: Any) -> Any:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except tf.errors.OpError as e:
            own = with_own_type(e)
            if own is e:
                raise
            raise own from None

    called.__dict__["_of_hvd"] = True
    return called
