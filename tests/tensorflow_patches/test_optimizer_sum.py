"""A Keras 3 optimizer applies gradients without their sum over replicas."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.tensorflow_patches import optimizer_sum
from patching import parameters_of, turn_off


def updated(strategy, block):
    """Returns a weight, initially 0, after both replicas have applied the gradient 1 with rate 1."""
    with strategy.scope():
        variable, optimizer = keras.Variable(0.0), keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    assert parameters_of(optimizer._all_reduce_sum_gradients) == ["grads_and_vars"]

    @tf.function
    def step():
        def replica():
            with block(optimizer):
                optimizer.apply([tf.constant(1.0)], [variable])

        strategy.run(replica)

    step()
    assert "_all_reduce_sum_gradients" not in vars(optimizer)
    return float(variable.numpy())


def test_without_the_patch_keras_sums_the_gradients(two_replicas, monkeypatch):
    assert updated(two_replicas, lambda optimizer: contextlib.nullcontext()) == -2.0
    turn_off(monkeypatch, "optimizer_sum")
    assert updated(two_replicas, optimizer_sum.summed_already) == -2.0


def test_within_the_block_they_are_applied_as_they_are(two_replicas):
    assert updated(two_replicas, optimizer_sum.summed_already) == -1.0


def test_the_assignment_of_averages_is_disabled_within_nested_blocks():
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_overwrite_frequency=5)
    with optimizer_sum.summed_already(optimizer) as outer:
        with optimizer_sum.summed_already(optimizer) as inner:
            assert (outer, inner, optimizer.ema_overwrite_frequency) == (5, 5, None)
        assert optimizer.ema_overwrite_frequency is None
    assert optimizer.ema_overwrite_frequency == 5


def test_an_optimizer_within_one_that_scales_the_loss_is_changed():
    inner = keras.optimizers.SGD(1.0)
    with optimizer_sum.summed_already(keras.optimizers.LossScaleOptimizer(inner)):
        assert "_all_reduce_sum_gradients" in vars(inner)
    assert np.isfinite(float(inner.learning_rate.numpy()))


def test_an_unknown_variable_that_keras_cannot_show_is_named_as_such():
    class AsInKeras312(keras.optimizers.SGD):
        def _check_variables_are_known(self, variables):
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")

    optimizer = AsInKeras312()
    with (
        pytest.raises(ValueError, match="Unknown variable: the optimizer was built with others"),
        optimizer_sum.summed_already(optimizer),
    ):
        optimizer._check_variables_are_known([])
    with pytest.raises(NotImplementedError, match="of the user"), optimizer_sum.summed_already(optimizer):
        raise NotImplementedError("of the user")
    assert "_all_reduce_sum_gradients" not in vars(optimizer)
