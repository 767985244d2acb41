"""Checks of the inputs and of the model of `ctl.fit`, one by one."""

import ctl
import keras
import numpy as np
import pytest
from ctl.data import python_batches
from ctl.keras import data
from ctl.keras.step_logs import NewestValue
from fitting import classifier, numbers

X = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize("batch", [X, [X], (X,), (X, None), (X, None, None)])
def test_a_batch_of_inputs_alone_has_one_part(batch):
    (only,) = python_batches._standard(batch)
    np.testing.assert_array_equal(only, X)


@pytest.mark.parametrize("batch", [(), (None, X), (X, None, X), (X, X, X, X)])
def test_a_batch_with_missing_or_too_many_parts_is_refused(batch):
    with pytest.raises(ctl.UsageError, match=r"expected \(inputs,\)"):
        python_batches._standard(batch)


def test_a_hint_names_the_fix_for_a_function_and_for_a_sequence():
    def batches():
        yield X

    class Sequence:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return X

    assert data._hint(batches) == " Call the function: batches()."
    assert "keras.utils.PyDataset" in data._hint(Sequence())
    assert data._hint([X]) == data._hint(5) == ""


def test_a_newest_value_that_was_reset_is_zero():
    value = NewestValue([])
    value.update_state(3.0, weight=2.0)
    assert value.result().numpy() == 3.0
    value.reset_state()
    assert value.result().numpy() == 0.0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ctl.KerasTrainer, "model is the class KerasTrainer; expected a Keras 3 model."),
        (keras.Sequential, "model is the class Sequential; expected a Keras 3 model."),
        (classifier, "model is a function; expected a Keras 3 model."),
        (keras.layers.Dense(1), "model is a Dense; expected a Keras 3 model."),
        ("model.keras", "model is 'model.keras'; expected a Keras 3 model."),
        (None, "model is None; expected a Keras 3 model."),
    ],
    ids=["a class", "a class of Keras", "a function", "a layer", "a path", "None"],
)
def test_an_object_that_is_no_model_is_refused(model, message):
    x, y, _ = numbers()
    for function in (ctl.fit, ctl.evaluate, lambda model, x, _: ctl.predict(model, x)):
        with pytest.raises(ctl.UsageError) as raised:
            function(model, x, y)
        assert str(raised.value) == message
