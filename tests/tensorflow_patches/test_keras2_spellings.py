"""Spellings of Keras 2 that Keras 3 refuses."""

import inspect

import keras
import pytest
from ctl.tensorflow_patches import keras2_spellings
from patching import turn_off


@pytest.fixture(autouse=True)
def original_classes(monkeypatch):
    """Removes the spellings during a test, and those of the test after it."""
    if "lr" in vars(keras.optimizers.Optimizer):
        monkeypatch.delattr(keras.optimizers.Optimizer, "lr")
    for cls in {*keras.optimizers.Optimizer.__mro__, *keras.Model.__mro__}:
        variables, compile_model = (vars(cls).get(name) for name in ("variables", "compile"))
        if isinstance(variables, property):
            monkeypatch.setattr(cls, "variables", property(inspect.unwrap(variables.fget)))
        if compile_model is not None:
            monkeypatch.setattr(cls, "compile", inspect.unwrap(compile_model))
    yield
    if "lr" in vars(keras.optimizers.Optimizer):
        del keras.optimizers.Optimizer.lr


def use_old_spellings():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", experimental_run_tf_function=False)
    model.optimizer.lr = 0.5
    assert len(model.optimizer.variables()) == len(model.optimizer.variables)
    return float(model.optimizer.learning_rate.numpy())


def test_keras_3_refuses_them():
    with pytest.raises(TypeError, match="experimental_run_tf_function"):
        use_old_spellings()
    optimizer = keras.optimizers.SGD()
    with pytest.raises(TypeError):
        optimizer.variables()
    assert not hasattr(optimizer, "lr")


def test_they_are_added_once():
    for _ in range(2):
        keras2_spellings.install_keras2_spellings()
    assert use_old_spellings() == 0.5


def test_they_can_be_turned_off(monkeypatch):
    turn_off(monkeypatch, "keras2_spellings")
    keras2_spellings.install_keras2_spellings()
    with pytest.raises(TypeError):
        use_old_spellings()
