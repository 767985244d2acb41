"""Names of modules and local variables of Keras in call stacks."""

import importlib

import keras
import pytest
import tensorflow as tf
from ctl.tensorflow_patches import keras_stack_frames

MODULES = {
    *keras_stack_frames.TRUSTED_MODULES, *keras_stack_frames.VARIABLE_MODULES,
    keras_stack_frames.NORMALIZATION_MODULE, keras_stack_frames.MERGING_MODULE,
}  # fmt: skip


@pytest.mark.parametrize("module", sorted(MODULES - {"tf_keras.src.random"}))  # only Keras 3 has it
def test_the_modules_exist(module):
    importlib.import_module(module)


@pytest.mark.parametrize("has_mask", [False, True])
def test_the_running_normalization_is_found_with_its_mask(has_mask):
    calls = []

    class Recording(keras.layers.BatchNormalization):
        def _moments(self, inputs, mask):
            calls.append(keras_stack_frames.normalization_call())
            return super()._moments(inputs, mask)

    layer = Recording()
    layer(tf.ones([2, 3, 4]), training=True, mask=tf.ones([2, 3], tf.bool) if has_mask else None)
    assert calls == [(layer, has_mask)]
    assert keras_stack_frames.normalization_call() is None


def test_assignments_of_optimizers_and_variables_are_in_the_named_modules(monkeypatch):
    calls = []
    value_class = type(tf.Variable(0.0))
    assign = value_class.assign

    def recorded_assign(self, *args, **kwargs):
        calls.append((
            keras_stack_frames.is_called_by(keras_stack_frames.TRUSTED_MODULES),
            keras_stack_frames.is_called_by(keras_stack_frames.VARIABLE_MODULES, "assign_"),
        ))  # fmt: skip
        return assign(self, *args, **kwargs)

    variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1)
    optimizer.build([variable])
    monkeypatch.setattr(value_class, "assign", recorded_assign)
    variable.assign_add(1.0)
    assert calls == [(False, True)]
    calls.clear()
    optimizer.apply([tf.constant(1.0)], [variable])
    assert calls and all(trusted for trusted, _ in calls)
