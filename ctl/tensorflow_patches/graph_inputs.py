"""Replacement of an input of an existing node of a graph.

Purpose: All-reduces of a function are fused while it is traced. Results that the program already uses
  get the output of a new node as their input.
Uses: `tf.Operation._update_input`.
Versions: TensorFlow 2.16 and later. Without the method, all-reduces are not fused.
Upstream issue: none known.
Switch: none, as this is a call.
"""

import tensorflow as tf


def can_update_inputs() -> bool:
    """Returns True if TensorFlow has the method."""
    return hasattr(tf.Operation, "_update_input")


def update_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Replaces an input of a node. The static shapes of its outputs do not change."""
    operation._update_input(index, tensor)
