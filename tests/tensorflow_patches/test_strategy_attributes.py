"""Private attributes of strategies."""

import inspect

import tensorflow as tf
from ctl.tensorflow_patches import strategy_attributes


def test_strategies_of_one_process_have_one_worker(two_replicas):
    strategies = [two_replicas, tf.distribute.get_strategy(), tf.distribute.MultiWorkerMirroredStrategy()]
    for strategy in strategies:
        assert not strategy_attributes.has_several_workers(strategy)


def test_a_parameter_server_strategy_counts_its_workers():
    """Two workers read the number in tests/workers."""
    assert "self._num_workers = " in inspect.getsource(tf.distribute.ParameterServerStrategy)
