"""Tensors and keys of a `tf.train.Checkpoint` before they are written.

Purpose: All workers read the variables, and only the chief writes them, in the background. The methods of
  `tf.train.Checkpoint` read and write in one call.
Uses: `_gather_serialized_tensors` and `_graph_view` of `tf.train.Checkpoint._saver`, and `_tensor` of
  the saved values.
Versions: TensorFlow 2.16 and later. Without the method, all workers write.
Upstream issue: none known.
Switch: none, as these are reads and calls.
"""

from collections.abc import Sequence
from typing import Any


def serialized_tensors(checkpoint: Any) -> tuple[Any, Any] | None:
    """Returns the tensors by object and the object graph, or None if they cannot be read separately."""
    gather = getattr(getattr(checkpoint, "_saver", None), "_gather_serialized_tensors", None)
    if gather is None:
        return None
    serialized = gather()
    if not isinstance(serialized, tuple) or len(serialized) != 4 or serialized[2]:
        return None  # [2]: savers that write files themselves
    return serialized[0], serialized[3]


def tracked_objects(checkpoint: Any) -> Sequence[Any]:
    """Returns the objects of a checkpoint in the order of its object graph; empty if unavailable."""
    view = getattr(checkpoint._saver, "_graph_view", None)
    traverse = getattr(view, "breadth_first_traversal", None)
    return () if traverse is None else traverse()[0]


def is_function(value: Any) -> bool:
    """Returns True for a value that reads its tensor anew on each access."""
    return callable(getattr(value, "_tensor", value))
