"""The rows of all replicas on each replica, for losses between the examples of a global batch."""

from typing import Any

import tensorflow as tf
from ctl.distribute import replica_sum
from ctl.errors import UsageError


def gather(rows: Any, largest: int, empty: Any = None) -> tuple[Any, Any]:
    """`[b, ...]` of this replica -> `[B, ...]` of all, by replica; and the place of its first row there.

    Each replica fills a slot of `largest` rows in a sum over replicas whose other slots are zero: its shape
    is the same in each step (decision 16), and its gradient is the sum of all replicas' gradients.

    Args:
      largest: rows of a replica, at most.
      empty: true where this replica has no example, and its one row only stands in; None: never.
    """
    rows = tf.convert_to_tensor(rows)
    if rows.shape.rank == 0:
        raise UsageError("gather() got a scalar; expected one row per example, shape [b, ...].")
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return rows, tf.constant(0)
    replicas, replica = context.num_replicas_in_sync, tf.cast(context.replica_id_in_sync_group, tf.int32)
    number = tf.shape(rows)[0]
    if empty is not None:
        number = tf.where(empty, 0, number)
    fits = tf.debugging.assert_less_equal(
        number,
        largest,
        f"gather() has room for {largest} rows of a replica, global_batch_size / {replicas}, and got more. "
        "Use batches of at most global_batch_size.",
    )
    with tf.control_dependencies([fits] if fits is not None else []):
        number = tf.identity(number)  # else the operations below may fail first, in other words
    counts = tf.one_hot(replica, replicas, on_value=number, off_value=0, dtype=tf.int32)
    counts = replica_sum.sum_over_all_replicas(counts)
    sent = tf.cast(rows, tf.int32) if rows.dtype == tf.bool else rows
    before = replica * largest
    rest = replicas * largest - before - number
    edges = tf.concat([[[before, rest]], tf.zeros([rows.shape.rank - 1, 2], tf.int32)], axis=0)
    slots = tf.pad(sent[:number], edges)
    slots.set_shape([replicas * largest, *rows.shape[1:]])
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, slots)
    real = tf.reshape(tf.sequence_mask(counts, largest), [-1])
    found = tf.boolean_mask(tf.cast(total, rows.dtype), real)
    return found, tf.reduce_sum(counts[:replica])
