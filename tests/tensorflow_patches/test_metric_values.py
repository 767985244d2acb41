"""Keras 3 metrics under central storage."""

import keras
import pytest
import tensorflow as tf
from ctl.tensorflow_patches import metric_values
from patching import turn_off


def mean_over_replicas(rounds):
    """Returns the mean of 1.0 over all replicas and rounds, which is 1.0, and its variables."""
    devices = [f"/cpu:{i}" for i in range(2)]
    strategy = tf.distribute.experimental.CentralStorageStrategy(devices, parameter_device="/cpu:0")
    with strategy.scope():
        metric = keras.metrics.Sum()
    for variable in metric.variables:
        assert "Aggregating" in type(variable.value).__name__
        metric_values.replace_value(variable)

    @tf.function
    def step():
        strategy.run(lambda: metric.update_state(tf.constant(1.0)))

    for _ in range(rounds):
        step()
    return float(metric.result())


def test_every_value_counts_once():
    assert mean_over_replicas(3) == 6.0


def test_without_the_patch_old_values_count_once_for_each_replica(monkeypatch):
    turn_off(monkeypatch, "metric_values")
    assert mean_over_replicas(3) != pytest.approx(6.0)
