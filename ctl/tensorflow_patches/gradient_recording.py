"""Gradients of nodes in graphs without the overhead of `tf.custom_gradient`.

Purpose: `tf.custom_gradient` registers a name for each traced call, which TensorFlow keeps forever.
Uses: `could_possibly_record`, `stop_recording` and `record_operation` of
  `tensorflow.python.eager.record`; `tf.Operation._set_attr`.
Versions: TensorFlow 2.16 and later. Without the functions, callers use `tf.custom_gradient`.
Upstream issue: none known.
Switch: none, as these are calls.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record


def can_record_operations() -> bool:
    """Returns True if TensorFlow has the function that `record_operation` calls."""
    return hasattr(record, "record_operation")


def may_be_recorded() -> bool:
    """Returns False if no gradient tape can request gradients of the next eager operation."""
    could_record: Callable[[], Any] | None = getattr(record, "could_possibly_record", None)
    return could_record is None or bool(could_record())


def stop_recording() -> AbstractContextManager[None]:
    """Returns a context manager; tapes do not record operations within it."""
    context_manager: AbstractContextManager[None] = record.stop_recording()
    return context_manager


def record_operation(
    name: str, outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], gradient: Callable[..., list[Any]]
) -> None:
    """Records an operation on all active tapes. `gradient(*upstream)` returns one gradient per input."""
    record.record_operation(name, outputs, inputs, gradient)


def set_integer_attribute(operation: tf.Operation, name: str, value: int) -> None:
    """Adds an attribute to a node of a graph."""
    operation._set_attr(name, tf.compat.v1.AttrValue(i=value))
