"""Calls of a model before its first step: new random numbers, and no changed variables."""

import keras
import numpy as np
from ctl.keras import part_values


def test_each_call_has_new_random_numbers_and_changes_no_variable():
    layers = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((64,)), *layers])
    before = [variable.numpy() for variable in model.variables]
    outputs = [part_values.call_model(model, np.ones([2, 64], np.float32), training=True) for _ in range(3)]
    for i, output in enumerate(outputs):
        assert not any(np.array_equal(output, other) for other in outputs[:i])
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
