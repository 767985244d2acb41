"""Rows of a batch, and the share of a global batch that falls to one replica.

Replica r of R gets rows n*r//R to n*(r+1)//R of a batch of n. Where n may be smaller than R, a share
says how many of its rows are real: a replica without any is lent its neighbour's, so that no layer
sees an empty batch, and they count nowhere.
"""

from typing import Any, NamedTuple

import tensorflow as tf


def num_rows(batch: Any) -> Any:
    """Examples in a batch: an int where static, else a scalar tensor (None for a mere spec)."""
    first = tf.nest.flatten(batch)[0]
    static = first.shape[0] if first.shape.rank else None
    if static is not None or isinstance(first, tf.TypeSpec):
        return static
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first)[0]


def take_rows(batch: Any, low: Any, high: Any) -> Any:
    """Rows `low` to `high` (exclusive) of every component of a batch; dense, ragged or sparse."""

    def take(component: Any) -> Any:
        if isinstance(component, tf.SparseTensor):
            start = tf.concat([[tf.cast(low, tf.int64)], component.dense_shape[1:] * 0], 0)
            size = tf.concat([[tf.cast(high - low, tf.int64)], component.dense_shape[1:]], 0)
            return tf.sparse.slice(component, start, size)
        return component[low:high]

    return tf.nest.map_structure(take, batch)


def may_be_empty(rows: Any, num_replicas: int) -> bool:
    """Whether a share of a batch of `rows` (None: unknown) can be without examples."""
    return num_replicas > 1 and not (isinstance(rows, int) and rows >= num_replicas)


def bounds(rows: Any, replica: int, num_replicas: int) -> Any:
    """First row, last row (exclusive, at least one row on), and the number of real rows."""
    low, high = rows * replica // num_replicas, rows * (replica + 1) // num_replicas
    if isinstance(low, int):
        return low, max(high, low + 1), high - low
    return low, tf.maximum(high, low + 1), high - low


class Share(NamedTuple):
    """What one replica gets of a global batch.

    Attributes:
      rows: a batch; real_rows: how many of its first rows are examples, int64 `[]`; None: all.
    """

    rows: Any
    real_rows: Any = None


def share(batch: Any, replica: int, num_replicas: int, *, counted: bool) -> Share:
    """One replica's rows of a global batch; if `counted`, with the number of real ones."""
    low, high, real = bounds(num_rows(batch), replica, num_replicas)
    return Share(take_rows(batch, low, high), tf.cast(real, tf.int64) if counted else None)
