"""The rows of all replicas on each replica, for losses between the examples of a global batch."""

from typing import Any

import tensorflow as tf
from ctl.distribute import replica_sum
from ctl.errors import UsageError


def gather(rows: Any, max_rows: int, is_empty: Any = None) -> tuple[Any, Any]:
    """Returns the rows of all replicas in the order of replicas.

    Each replica fills one slot of `max_rows` rows in a sum over replicas; its other slots are zero. So the
    shape is equal in each step (decision 16), and the gradient is the sum of the gradients of all replicas.

    Args:
      rows: `[b, ...]`, rows of this replica.
      max_rows: Largest number of rows of a replica.
      is_empty: `[]` bool, True where this replica has no example and `rows` is a placeholder, or None.

    Returns:
      The rows `[B, ...]`, and the index `[]` int32 of the first row of this replica.

    Raises:
      UsageError: If `rows` is a scalar.
    """
    rows = tf.convert_to_tensor(rows)
    if rows.shape.rank == 0:
        raise UsageError("gather() got a scalar; expected one row per example, shape [b, ...].")
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return rows, tf.constant(0)
    replicas, replica = context.num_replicas_in_sync, tf.cast(context.replica_id_in_sync_group, tf.int32)
    num_rows = tf.shape(rows)[0]
    if is_empty is not None:
        num_rows = tf.where(is_empty, 0, num_rows)
    fits = tf.debugging.assert_less_equal(
        num_rows,
        max_rows,
        f"gather() got more than {max_rows} rows of a replica, global_batch_size / {replicas}. Use batches "
        "of at most global_batch_size.",
    )
    with tf.control_dependencies([fits] if fits is not None else []):
        num_rows = tf.identity(num_rows)  # else the operations below may fail first with other messages
    counts = tf.one_hot(replica, replicas, on_value=num_rows, off_value=0, dtype=tf.int32)
    counts = replica_sum.sum_over_all_replicas(counts)
    sent = tf.cast(rows, tf.int32) if rows.dtype == tf.bool else rows
    before = replica * max_rows
    after = replicas * max_rows - before - num_rows
    padding = tf.concat([[[before, after]], tf.zeros([rows.shape.rank - 1, 2], tf.int32)], axis=0)
    slots = tf.pad(sent[:num_rows], padding)
    slots.set_shape([replicas * max_rows, *rows.shape[1:]])
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, slots)
    is_filled = tf.reshape(tf.sequence_mask(counts, max_rows), [-1])
    gathered = tf.boolean_mask(tf.cast(total, rows.dtype), is_filled)
    return gathered, tf.reduce_sum(counts[:replica])
