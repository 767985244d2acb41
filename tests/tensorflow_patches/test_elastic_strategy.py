"""The strategy of elastic jobs: graphs have the largest number of replicas, and means the current one."""

import pytest
import tensorflow as tf
from ctl.tensorflow_patches import collective_launchers, elastic_strategy
from patching import parameters_of
from tensorflow.python.distribute import collective_all_reduce_strategy


class CountingLauncher:
    """A launcher that returns its inputs times the number of workers, as if all workers had equal ones."""

    def __init__(self, count):
        self.count = count

    def can_order_nccl(self):
        return True

    def batch_all_reduce(self, packs, options=None):
        return [tensor * tf.cast(self.count, tensor.dtype) for pack in packs for tensor in pack]


@pytest.fixture
def count():
    return tf.Variable(2.0, dtype=tf.float64, trainable=False)


@pytest.fixture
def strategy(count):
    strategy = elastic_strategy.create_elastic_strategy(3, 2, lambda: int(count.numpy()), count)
    collective_launchers.replace_launchers(strategy, CountingLauncher(count))
    return strategy


def test_tensorflow_still_has_the_replaced_methods():
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    parameters = ["container_strategy", "cluster_resolver", "communication_options", "devices"]
    assert parameters_of(extended.__init__)[1:] == parameters
    assert parameters_of(extended._reduce_to)[1:] == ["reduce_op", "value", "destinations", "options"]
    assert parameters_of(extended._replica_ctx_all_reduce)[1:] == ["reduce_op", "value", "options"]
    assert isinstance(extended._num_replicas_in_sync, property)


def test_the_number_of_replicas_is_the_largest_in_graphs_and_the_current_one_outside(strategy, count):
    numbers = []

    @tf.function
    def trace():
        def replica():
            context = tf.distribute.get_replica_context()
            number = tf.get_static_value(context.replica_id_in_sync_group)
            numbers.append((context.num_replicas_in_sync, int(number)))

        strategy.run(replica)

    trace()
    assert numbers == [(3, 2)]
    assert strategy.num_replicas_in_sync == 2
    count.assign(3.0)
    assert strategy.num_replicas_in_sync == 3


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_a_traced_reduction_follows_the_number_of_workers(strategy, count, op):
    reduce_op = getattr(tf.distribute.ReduceOp, op)

    @tf.function
    def total():
        reduce = lambda: tf.distribute.get_replica_context().all_reduce(reduce_op, tf.constant([6.0]))  # noqa: E731
        return strategy.experimental_local_results(strategy.run(reduce))[0]

    for workers in (2.0, 3.0, 1.0):
        count.assign(workers)
        assert total().numpy().tolist() == [6.0 if op == "MEAN" else 6.0 * workers]


def test_a_variable_with_an_own_value_on_each_worker_is_the_mean_of_the_current_workers(strategy, count):
    with strategy.scope():
        variable = tf.Variable(
            4.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.MEAN
        )
    for workers in (1.0, 2.0, 3.0):
        count.assign(workers)
        assert variable.numpy() == 4.0


def test_variables_are_created_without_other_workers(strategy):
    with strategy.scope():
        assert tf.Variable(3.0).numpy() == 3.0
