"""Inputs of existing nodes are replaced."""

import tensorflow as tf
from ctl.tensorflow_patches import graph_inputs
from patching import parameters_of


def test_a_node_computes_with_its_new_input():
    assert graph_inputs.can_update_inputs()
    assert parameters_of(tf.Operation._update_input) == ["self", "index", "tensor"]

    @tf.function
    def doubled(x):
        result = 2.0 * tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([]), shape=[])
        graph_inputs.update_input(result.op.inputs[1].op, 0, x + 1.0)
        return result

    assert doubled(tf.constant(3.0)).numpy() == 8.0
