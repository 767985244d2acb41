"""`ctl.fit`, `ctl.evaluate` and `ctl.predict` accept `ctl.from_arrays(...)` and `ctl.from_source(...)`."""

import contextlib

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of

NUM_EXAMPLES, SIZE = 21, 8
X = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)
WEIGHT = np.arange(NUM_EXAMPLES, dtype=np.float32)


def from_list(arrays, batch_size, **options):
    return ctl.from_source(list(zip(*arrays, strict=True)), batch_size, **options)


FUNCTIONS = {"from_arrays": ctl.from_arrays, "from_source": from_list}
CASES = [(name, replicas) for name in FUNCTIONS for replicas in (1, 2)]


def linear_model(replicas=1):
    scope = contextlib.nullcontext()
    if replicas > 1:
        scope = ctl.make_strategy("mirrored", num_virtual_devices=replicas).scope()
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", weighted_metrics=["mae"])
    model.set_weights([np.full((4, 1), 0.1, np.float32), np.zeros(1, np.float32)])
    return model


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize("case", some_of(CASES, ("from_arrays", 1), ("from_source", 2)), ids=str)
def test_fit_has_the_history_of_the_same_arrays(case):
    name, replicas = case

    def history(*data, **options):
        return ctl.fit(linear_model(replicas), *data, epochs=3, verbose=0, seed=1, **options).history

    expected = history(X, Y, SIZE, sample_weight=WEIGHT, validation_data=(X, Y), validation_batch_size=5)
    make = FUNCTIONS[name]
    validation = make((X, Y), 5)
    assert_equal(history(make((X, Y, WEIGHT), SIZE), validation_data=validation), expected)


@pytest.mark.parametrize("name", some_of(FUNCTIONS, "from_arrays"))
def test_shuffle_and_the_numbers_of_steps_are_those_of_fit(name):
    def history(*data, **options):
        options |= dict(shuffle=False, steps_per_epoch=2, validation_steps=1, epochs=2)
        return ctl.fit(linear_model(), *data, verbose=0, **options).history

    data = FUNCTIONS[name]((X, Y), SIZE)
    expected = history(X, Y, SIZE, validation_data=(X, Y))
    assert_equal(history(data, validation_data=data, batch_size=SIZE), expected)


@pytest.mark.parametrize("case", some_of(CASES, ("from_arrays", 2), ("from_source", 1)), ids=str)
def test_evaluate_and_predict_have_the_results_of_the_same_arrays(case):
    name, replicas = case
    model, make = linear_model(replicas), FUNCTIONS[name]
    for steps in (None, 2):
        expected = ctl.evaluate(model, X, Y, SIZE, sample_weight=WEIGHT, steps=steps, verbose=0)
        data = make((X, Y, WEIGHT), SIZE)
        assert_equal(ctl.evaluate(model, data, steps=steps, verbose=0), expected)
        outputs = ctl.predict(model, X, SIZE, steps=steps)
        for parts in ((X,), (X, Y)):
            actual = ctl.predict(model, make(parts, SIZE), steps=steps)
            np.testing.assert_allclose(actual, outputs, rtol=1e-5)
    inputs_alone = ctl.from_source(list(X), SIZE)
    np.testing.assert_allclose(ctl.predict(model, inputs_alone), ctl.predict(model, X), rtol=1e-5)


@pytest.mark.parametrize("name", some_of(FUNCTIONS, "from_source"))
def test_an_unbuilt_model_gets_batches_after_the_functions_of_map(name):
    def model():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse")
        return model

    doubled = np.concatenate([X, X], axis=1)
    data = FUNCTIONS[name]((X, Y), SIZE).map(lambda x, y: (tf.concat([x, x], axis=1), y))
    np.testing.assert_allclose(ctl.predict(model(), data), ctl.predict(model(), doubled), rtol=1e-5)
    expected = ctl.fit(model(), doubled, Y, SIZE, verbose=0).history
    assert_equal(ctl.fit(model(), data, verbose=0).history, expected)


def test_targets_and_other_batch_sizes_beside_a_source_are_refused():
    data, model = from_list((X, Y), SIZE), linear_model()
    with pytest.raises(ctl.UsageError, match="x is a result of ctl.from_source, which contains the"):
        ctl.fit(model, data, Y)
    with pytest.raises(ctl.UsageError, match=r"^batch_size is 4; expected None or 8, .* Leave it out"):
        ctl.evaluate(model, data, batch_size=4)
    with pytest.raises(ctl.UsageError, match="validation_batch_size is 4; expected None or 8"):
        ctl.fit(model, X, Y, validation_data=data, validation_batch_size=4)
