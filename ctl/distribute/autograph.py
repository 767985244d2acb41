"""Conversion of the user's functions by AutoGraph. Functions of this package need no conversion.

Converting them too took 0.4 s of the start of a process.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_autograph = tf.__internal__.autograph
_BY_DEFAULT = _autograph.control_status_ctx()  # the status outside of all functions


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a user's function with Python's `if` and `for` over tensors, to be called while tracing."""
    graph_function: Callable[..., Any] = _autograph.tf_convert(function, _BY_DEFAULT)
    return graph_function
