"""Keras 3 metrics create their variables before their first update."""

import functools

import keras
import pytest
import tensorflow as tf
from ctl.step.keras_metrics import across_replicas
from ctl.tensorflow_patches import metric_building
from patching import parameters_of, turn_off

LABELS, SCORES = tf.constant([[1.0, 0.0]]), tf.constant([[0.9, 0.2]])


def create_in_scope(create):
    with tf.init_scope():
        create()


def updated(metric):
    tf.function(lambda: metric.update_state(LABELS, SCORES))()
    return metric.result().numpy().tolist()


def test_the_first_update_creates_the_variables_with_the_function():
    calls, metric = [], keras.metrics.F1Score()
    assert metric._built is False and parameters_of(metric._build) == ["y_true_shape", "y_pred_shape"]

    def create(build):
        calls.append(build)
        create_in_scope(build)

    metric_building.build_before_update(metric, create)
    for _ in range(2):
        assert updated(metric) == pytest.approx([1.0, 0.0])
    assert len(calls) == 1


def traced(strategy):
    """Traces a loop of updates on replicas; returns the metric after a call of the loop."""
    with strategy.scope():
        metric = keras.metrics.F1Score()
    metric_building.build_before_update(metric, functools.partial(across_replicas, strategy))

    @tf.function
    def update():
        for _ in tf.range(2):
            strategy.run(metric.update_state, (LABELS, SCORES))

    update.get_concrete_function()()
    return metric.result().numpy().tolist()


def test_replicas_create_the_variables_together(two_replicas):
    assert traced(two_replicas) == pytest.approx([1.0, 0.0])


def test_without_the_patch_replicas_cannot_create_the_variables(two_replicas, monkeypatch):
    turn_off(monkeypatch, "metric_building")
    with pytest.raises(Exception, match="Unable to lift tensor"):
        traced(two_replicas)


def test_metrics_with_variables_are_unchanged():
    metric = keras.metrics.Mean()
    metric_building.build_before_update(metric, create_in_scope)
    assert "update_state" not in vars(metric)
