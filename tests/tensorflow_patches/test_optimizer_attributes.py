"""Private attributes of optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from ctl.tensorflow_patches import optimizer_attributes as attributes

LIBRARIES = {"keras3": keras, "tf_keras": tf_keras}


def built(library, **options):
    variable = keras.Variable(1.0) if library == "keras3" else tf.Variable(1.0)
    optimizer = LIBRARIES[library].optimizers.SGD(0.1, momentum=0.9, **options)
    assert not attributes.is_built(optimizer)
    optimizer.build([variable])
    assert attributes.is_built(optimizer)
    return optimizer, variable


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_learning_rate_is_a_variable(library):
    optimizer, _ = built(library)
    for rate in (attributes.learning_rate_variable, attributes.legacy_learning_rate):
        rate(optimizer).assign(0.25)
        assert float(optimizer.learning_rate.numpy()) == 0.25


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_momentum_of_each_variable_is_found(library):
    optimizer, variable = built(library)
    (momentum,) = [m for m in attributes.momentums(optimizer) if m is not None]
    optimizer.apply_gradients([(tf.constant(1.0), variable)])
    assert float(momentum.numpy()) == pytest.approx(-0.1)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_momentum_of_other_optimizers_is_found(library):
    variable = keras.Variable(1.0) if library == "keras3" else tf.Variable(1.0)
    optimizer = LIBRARIES[library].optimizers.RMSprop(0.1, momentum=0.9)
    optimizer.build([variable])
    assert len(attributes.momentums(optimizer)) == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_variable_is_paired_with_its_moving_average(library):
    optimizer, variable = built(library, use_ema=True, ema_momentum=0.5)
    is_keras3 = library == "keras3"
    ((paired_variable, average),) = attributes.average_pairs(optimizer, [variable], is_keras3=is_keras3)
    assert paired_variable is variable
    if is_keras3:
        assert attributes.keras3_averages(optimizer, [variable]) == [average]
    optimizer.apply_gradients([(tf.constant(1.0), variable)])
    assert float(average.numpy()) != 1.0
    assert attributes.moving_averages(keras.optimizers.SGD()) in (None, [])


def test_variables_and_iterations_of_keras_3():
    optimizer, variable = built("keras3")
    assert list(attributes.trainable_variables(optimizer)) == [variable]
    assert attributes.trainable_variables(object(), default=True) is True
    attributes.count_step(optimizer)
    assert int(optimizer.iterations.numpy()) == 1


def test_the_strategy_of_an_optimizer(two_replicas):
    with two_replicas.scope():
        optimizer = keras.optimizers.SGD()
    assert attributes.strategy_of_optimizer(optimizer) is two_replicas
    assert attributes.strategy_of_optimizer(object()) is None


def test_legacy_optimizers_have_no_method_build():
    optimizer, variable = tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9), tf.Variable([1.0])
    assert attributes.is_legacy(optimizer) and not attributes.is_legacy(keras.optimizers.SGD())
    attributes.build_legacy(optimizer, [variable])
    assert any("momentum" in weight.name for weight in optimizer.weights)
    attributes.legacy_learning_rate(optimizer).assign(0.5)
    np.testing.assert_allclose(optimizer.learning_rate.numpy(), 0.5)
