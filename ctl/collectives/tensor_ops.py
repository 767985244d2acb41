"""Collectives on tensors, executed eagerly or added to a graph."""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.collectives import graph_nodes
from ctl.collectives.calls import Call, submit_call, wait_for_results

_MANY = 8  # arrays
_SMALL = 1 << 16  # bytes; larger arrays are not copied
_ALIGNMENT = 64
_FRAMEWORK_FOLDERS = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(tf.__file__) + os.sep,
)


def run_collective(call: Call, tensors: Sequence[tf.Tensor], name: str | None, default: str) -> list[Any]:
    """Runs a collective eagerly, or adds its nodes to the current graph.

    Args:
      call: The collective, without a name.
      tensors: Its inputs.
      name: Name given by the user, or None.
      default: Name without `name`. Eager calls are then also identified by their program line.

    Returns:
      The result tensors.
    """
    call.group.check_registered()
    if tf.executing_eagerly():
        line = "" if name else _find_program_line()
        pending_call = submit_call(call, tensors, name or default, line)
        return _to_tensors(wait_for_results(pending_call))
    call = replace(call, name=_create_unique_name(name or default, call.ignores_scope), is_eager=False)
    return graph_nodes.add_collective(call, tensors)


def add_graph_barrier(call: Call, name: str) -> tf.Operation:
    """Adds an operation to the current graph that completes when all ranks have run it."""
    return graph_nodes.add_barrier(replace(call, name=_create_unique_name(name), is_eager=False))


def _find_program_line() -> str:
    """Returns the first line of the call stack outside of this package and TensorFlow."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_FRAMEWORK_FOLDERS):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _to_tensors(arrays: Sequence[Any]) -> list[tf.Tensor]:
    """Converts arrays to eager tensors, many small arrays of one dtype and shape with one operation."""
    first = arrays[0] if arrays else None
    if len(arrays) < _MANY or not isinstance(first, np.ndarray):
        return [_to_tensor(array) for array in arrays]
    if first.nbytes > _SMALL or _is_usable(first):
        return [_to_tensor(array) for array in arrays]
    signature = first.dtype, first.shape
    if not all(
        isinstance(array, np.ndarray) and (array.dtype, array.shape) == signature for array in arrays
    ):
        return [_to_tensor(array) for array in arrays]
    return tf.unstack(tf.convert_to_tensor(np.stack(arrays)), num=len(arrays))


def _to_tensor(array: Any) -> tf.Tensor:
    """Converts an array to an eager tensor, without a copy if TensorFlow can use its memory."""
    if isinstance(array, tf.Tensor):
        return array
    is_usable = _is_usable(array)
    if is_usable and array.dtype.kind in "fiu":
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    if is_usable and array.dtype == tf.bfloat16.as_numpy_dtype:  # a type that DLPack lacks
        bits = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
        return tf.bitcast(bits, tf.bfloat16)
    return tf.convert_to_tensor(array)


def _is_usable(array: np.ndarray) -> bool:
    """Returns True if a tensor can use the memory of a result. TensorFlow aborts on unaligned memory."""
    is_writable = array.size > 0 and array.flags.writeable
    return is_writable and array.__array_interface__["data"][0] % _ALIGNMENT == 0


def _create_unique_name(name: str, ignores_scope: bool = False) -> str:
    cleaned = re.sub("[^a-zA-Z0-9_./]", "_", name)
    graph = tf.compat.v1.get_default_graph()
    if not ignores_scope:
        return graph.unique_name(cleaned)
    with graph.name_scope(None):
        return graph.unique_name(cleaned)
