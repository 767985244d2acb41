"""The reduction of the values of Keras 3 losses is replaced."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.tensorflow_patches import loss_reduction
from keras.src.losses import loss as keras_module
from patching import parameters_of, restore_original, turn_off

SCALES = ("scale_loss_for_distribution", "unscale_loss_for_distribution")


class Recorded:
    """Replacement that records the names of the called methods and returns the original results."""

    def __init__(self):
        self.calls = []

    def reduce(self, original, same_rank, *arguments):
        assert callable(same_rank)
        self.calls.append("reduce")
        return original(*arguments)

    def scale(self, original, value):
        self.calls.append("scale")
        return original(value)

    def unscale(self, original, value):
        self.calls.append("unscale")
        return original(value)


@pytest.fixture
def recorded(monkeypatch):
    original = restore_original(monkeypatch, keras_module, "reduce_weighted_values")
    assert parameters_of(original) == ["values", "sample_weight", "mask", "reduction", "dtype"]
    for name in SCALES:
        function = getattr(keras_module, name)
        if isinstance(function, functools.partial):
            function = function.args[0]
        assert parameters_of(function) == ["value"]
        monkeypatch.setattr(keras_module, name, function)
    return Recorded()


def loss_of(strategy, prediction):
    loss = keras.losses.MeanSquaredError()
    values = strategy.run(lambda: loss(tf.zeros([2, 1]), tf.fill([2, 1], prediction)))
    return [float(value) for value in strategy.experimental_local_results(values)]


def test_keras_calls_the_replacements(recorded):
    for _ in range(2):
        loss_reduction.replace_loss_reduction(recorded)
    assert loss_of(tf.distribute.get_strategy(), 2.0) == [4.0]
    assert recorded.calls == ["reduce", "scale"]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    model.train_on_batch(np.ones([2, 1]), np.ones([2, 1]))
    assert {"reduce", "scale", "unscale"} == set(recorded.calls)


def test_without_the_patch_keras_divides_by_the_number_of_replicas(recorded, two_replicas, monkeypatch):
    turn_off(monkeypatch, "loss_reduction")
    loss_reduction.replace_loss_reduction(recorded)
    assert loss_of(two_replicas, 2.0) == [2.0, 2.0]
    assert not recorded.calls


def test_losses_of_different_rank_are_aligned_by_the_function_of_keras():
    y, weight = keras_module.squeeze_or_expand_to_same_rank(tf.zeros([2, 1]), tf.zeros([2]))
    assert y.shape == weight.shape
