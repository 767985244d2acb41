"""Scalars count in a Mean metric by the share of their replica."""

import keras
import pytest
import tensorflow as tf
from ctl.tensorflow_patches import weighted_means
from keras.src.metrics import reduction_metrics
from patching import parameters_of, restore_original, turn_off


@pytest.fixture(autouse=True)
def original(monkeypatch):
    function = restore_original(monkeypatch, reduction_metrics.Mean, "update_state")
    assert parameters_of(function) == ["self", "values", "sample_weight"]


def mean_of_parts():
    """Returns the mean of 1 with share 3/4, and of 2 with share 1/4."""
    metric = keras.metrics.Mean()
    for value, share in ((1.0, 0.75), (2.0, 0.25)):
        with weighted_means.weighted_means(tf.constant(share)):
            metric.update_state(value)
    return float(metric.result())


def test_within_the_block_a_scalar_counts_by_its_share():
    assert mean_of_parts() == 1.25


def test_without_the_patch_each_scalar_counts_once(monkeypatch):
    turn_off(monkeypatch, "weighted_means")
    assert mean_of_parts() == 1.5


def test_other_updates_are_unchanged():
    metric = keras.metrics.Mean()
    with weighted_means.weighted_means(tf.constant(0.25)):
        metric.update_state([1.0, 2.0])
        metric.update_state(6.0, sample_weight=2.0)
    metric.update_state(1.0)
    assert float(metric.result()) == pytest.approx(16.0 / 5.0)
