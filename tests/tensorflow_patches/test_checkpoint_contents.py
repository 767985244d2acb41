"""Contents of a checkpoint before it is written."""

import tensorflow as tf
from ctl.tensorflow_patches import checkpoint_contents


def test_the_tensors_and_the_objects_have_the_keys_of_the_graph():
    variable = tf.Variable([1.0, 2.0])
    checkpoint = tf.train.Checkpoint(weights=variable)
    tensors, graph = checkpoint_contents.serialized_tensors(checkpoint)
    value_by_key = {key: value for values in tensors.values() for key, value in values.items()}
    objects = checkpoint_contents.tracked_objects(checkpoint)
    (node,) = [node for tracked, node in zip(objects, graph.nodes, strict=True) if tracked is variable]
    value = value_by_key[node.attributes[0].checkpoint_key]
    assert checkpoint_contents.is_function(value)
    assert value.tensor.numpy().tolist() == [1.0, 2.0]
    variable.assign([3.0, 4.0])
    assert value.tensor.numpy().tolist() == [3.0, 4.0]


def test_constants_are_no_functions():
    assert not checkpoint_contents.is_function(tf.constant(1.0))


def test_other_checkpoints_have_no_separate_contents():
    assert checkpoint_contents.serialized_tensors(object()) is None
