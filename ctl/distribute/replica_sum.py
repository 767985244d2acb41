"""Sums over replicas that have no gradient."""

from typing import Any

import tensorflow as tf


def sum_over_all_replicas(value: Any) -> Any:
    """Returns the sum over all replicas of a dense tensor, or of each of a list; in replica context.

    `ReplicaContext.all_reduce` registers a gradient function for each call. TensorFlow never removes it, so
    the graph of every trainer would stay in memory.
    """
    context = tf.distribute.get_replica_context()
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        return context.all_reduce(tf.distribute.ReduceOp.SUM, value)
    flat = tf.nest.flatten(value)
    totals = context.merge_call(_reduce_together, args=tuple(map(tf.convert_to_tensor, flat)))
    return tf.nest.pack_sequence_as(value, totals)


def _reduce_together(strategy: tf.distribute.Strategy, *values: Any) -> Any:
    pairs = [(value, value) for value in values]
    return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
