"""Partition of the rows of a global batch over replicas.

Replica r of R gets rows n*r//R to n*(r+1)//R of a batch of n rows. If n may be smaller than R, a share also
contains the number of its real rows. A replica without real rows gets a row of its neighbour, because
layers may not support empty batches. This row does not count in any sum or metric.
"""

from typing import Any, NamedTuple

import tensorflow as tf


def num_rows(batch: Any) -> Any:
    """Returns the number of examples: an int if static, else a scalar tensor (None for a TypeSpec)."""
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
    """Returns rows `low` to `high` (exclusive) of each component of a batch; dense, ragged or sparse."""

    def take(component: Any) -> Any:
        if isinstance(component, tf.SparseTensor):
            start = tf.concat([[tf.cast(low, tf.int64)], component.dense_shape[1:] * 0], 0)
            size = tf.concat([[tf.cast(high - low, tf.int64)], component.dense_shape[1:]], 0)
            return tf.sparse.slice(component, start, size)
        return component[low:high]

    return tf.nest.map_structure(take, batch)


def with_unknown_rows(batch: Any) -> Any:
    """Returns the batch without static numbers of rows in dense components. Called while tracing."""

    def relax(component: Any) -> Any:
        if not isinstance(component, tf.Tensor) or not component.shape.rank:
            return component
        return tf.compat.v1.placeholder_with_default(component, [None, *component.shape[1:]])

    return tf.nest.map_structure(relax, batch)


def may_be_empty(rows: Any, num_replicas: int) -> bool:
    """Returns True if a share of a batch of `rows` (None: unknown) can have no examples."""
    return num_replicas > 1 and not (isinstance(rows, int) and rows >= num_replicas)


def bounds(rows: Any, replica: int, num_replicas: int) -> Any:
    """Returns (first row, end row, number of real rows). The end is exclusive and after the first row."""
    low, high = rows * replica // num_replicas, rows * (replica + 1) // num_replicas
    if isinstance(low, int):
        return low, max(high, low + 1), high - low
    return low, tf.maximum(high, low + 1), high - low


class Share(NamedTuple):
    """Part of a global batch for one replica.

    Attributes:
      rows: Nested structure of tensors `[r, ...]`.
      real_rows: Number of leading rows that are examples, int64 `[]`. None: all rows.
    """

    rows: Any
    real_rows: Any = None


def share(batch: Any, replica: int, num_replicas: int, *, counted: bool) -> Share:
    """Returns one replica's rows of a global batch, with the number of real rows if `counted`."""
    low, high, real = bounds(num_rows(batch), replica, num_replicas)
    return Share(take_rows(batch, low, high), tf.cast(real, tf.int64) if counted else None)
