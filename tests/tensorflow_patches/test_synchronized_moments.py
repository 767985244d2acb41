"""Placeholder rows do not count in the statistics of synchronized BatchNormalization."""

import numpy as np
import pytest
import tensorflow as tf
from ctl.tensorflow_patches import synchronized_moments
from keras.src.backend.tensorflow import nn
from patching import parameters_of, restore_original, turn_off


@pytest.fixture(autouse=True)
def original(monkeypatch):
    function = restore_original(monkeypatch, nn, "_compute_moments_sync")
    assert parameters_of(function) == ["x", "axes", "keepdims"]


def moments(strategy, has_placeholder):
    """Returns mean and variance where replica 0 has the rows 1 and 3, and replica 1 those of 9."""

    def replica():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        x = tf.where(number == 0, [[1.0], [3.0]], [[9.0], [9.0]])
        with synchronized_moments.without_placeholders((number == 1) if has_placeholder else None):
            return nn.moments(x, axes=[0], synchronized=True)

    results = tf.function(lambda: strategy.run(replica))()
    return [float(np.squeeze(strategy.experimental_local_results(part)[0])) for part in results]


def test_an_empty_replica_does_not_count(two_replicas):
    assert moments(two_replicas, has_placeholder=True) == [2.0, 1.0]


def test_without_placeholders_keras_computes_the_same_as_before(two_replicas):
    synchronized_moments._install()
    assert moments(two_replicas, has_placeholder=False) == [5.5, 12.75]


def test_without_the_patch_placeholders_count(two_replicas, monkeypatch):
    turn_off(monkeypatch, "synchronized_moments")
    assert moments(two_replicas, has_placeholder=True) == [5.5, 12.75]
