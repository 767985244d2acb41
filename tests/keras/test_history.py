"""The result of `ctl.fit` where a program expects the result of `Model.fit`."""

import ctl
import keras
import numpy as np
import pytest
from conftest import some_of

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def compiled_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("has_callbacks", some_of([False, True], True))
def test_the_history_is_that_of_keras(has_callbacks):
    callbacks = [keras.callbacks.LambdaCallback()] * has_callbacks
    model, expected_model = compiled_model(), compiled_model()
    arguments = {"epochs": 3, "validation_data": (X, Y), "shuffle": False, "verbose": 0}
    history = ctl.fit(model, X, Y, callbacks=callbacks, **arguments)
    expected = expected_model.fit(X, Y, callbacks=callbacks, **arguments)
    assert isinstance(history, keras.callbacks.History)
    assert history.model is model and model.history is history
    assert (history.epoch, history.params) == (expected.epoch, expected.params)
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)


def test_a_training_without_epochs_has_an_empty_history():
    history = ctl.fit(compiled_model(), X, Y, epochs=1, initial_epoch=1, verbose=0)
    assert (history.history, history.epoch) == ({}, [])


def test_the_limits_of_keras_are_warned_of_and_apply(caplog):
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        history = ctl.fit(compiled_model(), X, Y, epochs=4, batch_size=8, verbose=0)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert (history.epoch, history.params["steps"]) == ([0, 1], 3)
    assert "epochs=4 is limited to 2 by keras.config.set_max_epochs" in caplog.text
    assert "limited to 3 steps by keras.config.set_max_steps_per_epoch" in caplog.text
