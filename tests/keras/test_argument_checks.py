"""Arguments of wrong types or values are refused by `ctl.fit`, `ctl.evaluate` and `ctl.predict`."""

import inspect

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf

X, Y = np.arange(24, dtype=np.float32).reshape(8, 3), np.ones((8, 1), np.float32)
FUNCTIONS = {"fit": ctl.fit, "evaluate": ctl.evaluate, "predict": ctl.predict}
NUMBERS = ["batch_size", "epochs", "initial_epoch", "steps_per_epoch", "validation_steps", "steps",
           "validation_batch_size", "save_every_steps"]  # fmt: skip
CASES = [
    (name, parameter) for name, function in FUNCTIONS.items() for parameter in NUMBERS
    if parameter in inspect.signature(function).parameters
]  # fmt: skip


def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def model():
    return compiled()


def call(name, model, **arguments):
    data = {"x": X, "verbose": 0} if name == "predict" else {"x": X, "y": Y, "verbose": 0}
    return FUNCTIONS[name](model, **{**data, **arguments})


@pytest.mark.parametrize(("name", "parameter"), CASES)
def test_a_number_of_another_type_or_below_its_minimum_is_refused(model, name, parameter):
    minimum = 0 if parameter in ("epochs", "initial_epoch", "save_every_steps") else 1
    for value in ("x", "3", -1, 1.5, True, np.nan, [], {}, object(), int, b"x", minimum - 1):
        with pytest.raises(ctl.UsageError, match=f"{parameter} is .*expected a whole number >= {minimum}"):
            call(name, model, **{parameter: value})


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("fit", {"epochs": None}, "epochs is None; expected a whole number >= 0"),
    ("fit", {"shuffle": "False"}, "shuffle is 'False'; expected True, False or \"batch\""),
    ("fit", {"shuffle": 2}, "shuffle is 2; expected True or False"),
    ("fit", {"validation_split": "0.1"}, "validation_split is '0.1'; expected a number"),
    ("fit", {"validation_split": 1.5}, "validation_split is 1.5; expected a number >= 0 and < 1"),
    ("fit", {"validation_data": "rows"}, "validation_data is 'rows'; expected arrays with one row per"),
    ("fit", {"validation_data": (X, 1.0)}, "validation_data contains 1.0; expected arrays"),
    ("fit", {"validation_data": []}, r"validation_data is \(\); expected arrays with one row per"),
    ("fit", {"validation_data": (X, Y), "validation_freq": "x"}, "validation_freq is 'x'; expected"),
    ("fit", {"validation_data": (X, Y), "validation_freq": [1, "x"]}, "epoch of validation_freq is 'x'"),
    ("fit", {"sync_batch_norm": "no"}, "sync_batch_norm is 'no'; expected True or False"),
    ("fit", {"own_step": 1}, "own_step is 1; expected a string or None"),
    ("fit", {"model_dir": 1}, "model_dir is 1; expected a string or a path or None"),
    ("fit", {"seed": "1"}, "seed is '1'; expected an integer or None"),
    ("fit", {"verbose": [1]}, r"verbose is \[1\]; expected"),
    ("fit", {"y": []}, r"y is \[\]; expected arrays with one row per example"),
    ("fit", {"y": {}}, "y is {}; expected arrays with one row per example"),
    ("fit", {"sample_weight": 2.0}, "sample_weight is 2.0; expected arrays with one row per example"),
    ("evaluate", {"x": np.float32(1)}, r"x is .*1.0.*; expected arrays with one row per example"),
    ("evaluate", {"return_dict": "no"}, "return_dict is 'no'; expected True or False"),
    ("evaluate", {"model": "model"}, "model is 'model'; expected a Keras 3 model"),
    ("predict", {"x": []}, r"x is \[\]; expected arrays with one row per example"),
    ("predict", {"verbose": "quiet"}, 'verbose is \'quiet\'; expected "auto", 0'),
])  # fmt: skip
def test_a_wrong_argument_is_named_with_the_expected_value(model, name, arguments, message):
    with pytest.raises(ctl.UsageError, match=message):
        call(name, **{"model": model, **arguments})


def test_numbers_of_other_libraries_are_numbers(model):
    steps = tf.data.Dataset.range(2).cardinality()  # a tensor
    history = call("fit", model, epochs=np.int64(2), batch_size=np.int32(4), steps_per_epoch=steps)
    assert len(history.history["loss"]) == 2
    assert call("predict", model, batch_size=4.0, steps=steps).shape == (8, 1)
    assert call("evaluate", model, batch_size=3, steps=np.uint8(1)) == call("evaluate", model, **{
        "x": X[:3], "y": Y[:3]})  # fmt: skip


def test_the_python_error_for_an_unknown_argument_names_the_function(model):
    with pytest.raises(TypeError, match=r"fit\(\) got an unexpected keyword argument 'epoch'"):
        call("fit", model, epoch=3)
    with pytest.raises(TypeError, match=r"predict\(\) missing 1 required positional argument: 'x'"):
        ctl.predict(model)


@pytest.mark.parametrize("is_array", [True, False])
def test_batches_stay_as_they_are_with_shuffle_batch(is_array):
    data = {"x": X, "y": Y, "batch_size": 2} if is_array else {
        "x": ctl.from_arrays((X, Y), 2), "y": None}  # fmt: skip
    losses = {
        shuffle: call("fit", compiled(), epochs=2, shuffle=shuffle, seed=1, **data).history["loss"]
        for shuffle in (False, "batch", True)
    }
    expected = compiled().fit(X, Y, batch_size=2, epochs=2, shuffle="batch", verbose=0).history["loss"]
    assert losses["batch"] == losses[False] != losses[True]
    assert losses["batch"] == pytest.approx(expected, rel=1e-5)
