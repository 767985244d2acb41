"""Gradients of nodes of graphs."""

import tensorflow as tf
from ctl.tensorflow_patches import gradient_recording
from patching import parameters_of
from tensorflow.python.eager import record
from tensorflow.python.framework import ops


def test_tensorflow_has_the_functions():
    assert gradient_recording.can_record_operations()
    assert parameters_of(record.record_operation)[:4] == [
        "op_type", "output_tensors", "input_tensors", "backward_function",
    ]  # fmt: skip
    assert parameters_of(tf.Operation._set_attr) == ["self", "attr_name", "attr_value"]


def test_a_recorded_operation_has_its_gradient_and_its_inner_operations_none():
    @tf.function
    def gradient_of(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with gradient_recording.stop_recording():
                y = tf.square(x)
            gradient_recording.record_operation("Tripled", [y], [x], lambda upstream: [3.0 * upstream])
            gradient_recording.set_integer_attribute(y.op, "_number", 5)
        assert y.op.get_attr("_number") == 5
        return tape.gradient(y, x)

    assert gradient_of(tf.constant(2.0)).numpy() == 3.0


def test_only_a_tape_may_record_an_eager_operation():
    assert not gradient_recording.may_be_recorded()
    with tf.GradientTape():
        assert gradient_recording.may_be_recorded()


def test_a_custom_gradient_registers_a_name_for_each_trace():
    def num_names():
        return len(ops.gradient_registry.list())

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda upstream: upstream

    before = num_names()
    for _ in range(3):
        tf.function(identity).get_concrete_function(tf.constant(1.0))
    assert num_names() >= before + 3
