"""Memory of sums over replicas, and their values."""

import gc

import ctl
import numpy as np
import pytest
import tensorflow as tf
from ctl.distribute.replica_sum import sum_over_all_replicas
from small_models import Small
from tensorflow.python.framework import ops


def graphs_of_steps():
    gc.collect()
    return [o for o in gc.get_objects() if type(o).__name__ == "FuncGraph" and o.name == "_many"]


@pytest.mark.slow
def test_the_graph_of_a_step_on_replicas_is_released_with_its_trainer(two_replicas):
    def train():
        trainer = Small(
            strategy=two_replicas, global_batch_size=8, writers=[], checkpoints=ctl.NullCheckpoints()
        )
        trainer.train(2)

    registered_gradients, num_graphs = set(ops.gradient_registry.list()), len(graphs_of_steps())
    train()
    assert set(ops.gradient_registry.list()) <= registered_gradients
    assert len(graphs_of_steps()) <= num_graphs


def test_one_tensor_and_a_list_are_summed_on_every_replica(two_replicas):
    @tf.function
    def sums():
        def sum_on_replica(replica=None):
            value = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group + 1, tf.float32)
            return sum_over_all_replicas(value), sum_over_all_replicas([value * [1, 2], value])

        return two_replicas.run(sum_on_replica)

    single, (pair, last) = sums()
    for value, expected in ((single, 3.0), (pair, [3.0, 6.0]), (last, 3.0)):
        for replica_value in two_replicas.experimental_local_results(value):
            np.testing.assert_allclose(replica_value, expected)
