"""Translation of errors that TensorFlow raises from calls of graphs and sessions.

Purpose: A node that calls Python passes only the message of an exception, and TensorFlow raises
  UnknownError. The wrappers give errors of collectives their original types.
Replaces: `call_function` of `tensorflow.python.eager.context.Context` and `_do_call` of
  `tensorflow.python.client.session.BaseSession`.
Versions: TensorFlow 2.16 and later; a method that does not exist is skipped.
Upstream issue: none known.
Switch: `graph_call_errors`. Without the patch the errors keep TensorFlow's types.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches

_MARK = "_of_hvd"


def translate_graph_errors(translate: Callable[[Exception], Exception]) -> None:
    """Makes calls of graphs raise `translate(error)` in place of each `tf.errors.OpError`; idempotent."""
    from tensorflow.python.client import session
    from tensorflow.python.eager import context

    if not switches.is_enabled("graph_call_errors"):
        return
    methods: list[tuple[Any, str]] = [
        (getattr(context, "Context", None), "call_function"),
        (getattr(session, "BaseSession", None), "_do_call"),
    ]
    for cls, method in methods:
        call = getattr(cls, method, None)
        if call is not None and not hasattr(call, _MARK):
            setattr(cls, method, _translating(call, translate))


def _translating(call: Any, translate: Callable[[Exception], Exception]) -> Any:
    @functools.wraps(call)
    def translating_call(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except tf.errors.OpError as e:
            error = translate(e)
            if error is e:
                raise
            raise error from None

    translating_call.__dict__[_MARK] = True
    return translating_call
