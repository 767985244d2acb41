"""A MultiWorkerMirroredStrategy with a variable number of workers.

Purpose: workers of an elastic job keep their traced functions. A graph contains the largest number of
  replicas; means are sums that are divided by the current number, a variable.
Replaces: in a subclass of `CollectiveAllReduceExtended`: `_num_replicas_in_sync`, `_reduce_to`,
  `_replica_ctx_all_reduce`, `_batch_reduce_to`, and `_get_variable_creator_initial_value`, which does not
  broadcast. Sets `_num_workers` and `_id_in_cluster`, and `_group_size` of its `CollectiveAllReduce`s.
Versions: TensorFlow 2.16 and later.
Upstream issue: none.
Switch: none; elastic jobs have no other strategy.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, distribute_lib, values

_MEAN, _SUM = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM


def create_elastic_strategy(
    max_replicas: int, replica: int, count_replicas: Callable[[], int], replica_count: tf.Variable
) -> tf.distribute.Strategy:
    """Returns a strategy with one replica on the CPU of this process, as one of `max_replicas`.

    Args:
      max_replicas: Largest number of replicas, at least 2.
      replica: Number of the replica of this process.
      count_replicas: Returns the current number of replicas.
      replica_count: The current number of replicas, `[]` float64, for use in graphs.
    """
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)  # TensorFlow's collectives cannot be configured now, and are not used
    try:
        return _ElasticStrategy(max_replicas, replica, count_replicas, replica_count)
    finally:
        logger.setLevel(level)


class _ElasticStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    def __init__(self, *arguments: Any):
        distribute_lib.Strategy.__init__(self, _Extended(self, *arguments))


class _Extended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        max_replicas: int,
        replica: int,
        count_replicas: Callable[[], int],
        replica_count: tf.Variable,
    ):
        self._count_replicas, self._replica_count = count_replicas, replica_count
        super().__init__(
            strategy,
            cluster_resolver=None,
            communication_options=tf.distribute.experimental.CommunicationOptions(),
            devices=("/device:CPU:0",),
        )
        self._num_workers, self._id_in_cluster = max_replicas, replica
        for operations in (self._cross_device_ops, self._host_cross_device_ops):
            operations._group_size = max_replicas  # a group of one would skip the collective

    @property
    def _num_replicas_in_sync(self) -> int:
        """The current number outside of graphs, the largest number in graphs."""
        return self._count_replicas() if tf.executing_eagerly() else self._num_workers

    def _get_variable_creator_initial_value(self, *arguments: Any, **options: Any) -> Any:
        create = super()._get_variable_creator_initial_value(*arguments, **options)

        def create_without_broadcast() -> Any:
            num_workers, self._num_workers = self._num_workers, 1
            try:
                return create()
            finally:
                self._num_workers = num_workers

        return create_without_broadcast

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if reduce_op == _MEAN and not isinstance(value, values.Mirrored):
            reduce_op, value = _SUM, self._divided(value)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Sequence, options: Any) -> Any:
        if reduce_op == _MEAN:
            reduce_op = _SUM
            value_destination_pairs = [(self._divided(v), d) for v, d in value_destination_pairs]
        return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if reduce_op == _MEAN:
            reduce_op, value = _SUM, tf.nest.map_structure(self._divided, value)
        return super()._replica_ctx_all_reduce(reduce_op, value, options)

    def _divided(self, value: Any) -> Any:
        """Returns the value of this replica, divided by the current number of replicas."""
        if isinstance(value, values.DistributedValues):
            value = value.values[0]
        value = tf.convert_to_tensor(value)
        return value / tf.cast(self._replica_count, value.dtype)
