"""Private attributes of datasets."""

import numpy as np
import tensorflow as tf
from ctl.tensorflow_patches import dataset_attributes as attributes


def numbers():
    return tf.data.Dataset.from_tensor_slices(np.arange(8))


def parts_by_name(dataset):
    return {type(part).__name__.strip("_"): part for part in attributes.pipeline_parts(dataset)}


def test_the_parts_of_a_pipeline():
    dataset = tf.data.Dataset.zip(numbers().shuffle(4, seed=3), tf.data.Dataset.range(8)).batch(2)
    names = set(parts_by_name(dataset))
    assert names == {"BatchDataset", "ZipDataset", "ShuffleDataset", "TensorSliceDataset", "RangeDataset"}
    assert [type(part).__name__.strip("_") for part in attributes.inputs_of(dataset)] == ["ZipDataset"]
    assert attributes.inputs_of(object()) == []


def test_the_settings_of_datasets():
    parts = parts_by_name(numbers().shuffle(4, seed=3).shard(4, 1).batch(2))
    assert attributes.seeds_of(parts["ShuffleDataset"], ("seed", "seed2"))[1] == 3
    assert attributes.seeds_of(parts["BatchDataset"], ("seed", "seed2")) is None
    assert [int(part) for part in attributes.shard_of(parts["ShardDataset"])] == [4, 1]
    assert attributes.shard_of(parts["BatchDataset"]) == (None, None)
    assert int(attributes.batch_size_setting(parts["BatchDataset"])) == 2
    assert attributes.batch_size_setting(parts["ShardDataset"]) is None
    (tensor,) = attributes.tensors_of(parts["TensorSliceDataset"])
    assert tensor.shape == [8]
    assert not attributes.tensors_of(parts["BatchDataset"])


def test_the_functions_and_the_determinism_of_a_map():
    dataset = numbers().map(lambda x: x + 1, num_parallel_calls=2, deterministic=False)
    (function,) = attributes.functions_of(dataset)
    assert {"AddV2"} <= {node.op for node in function.graph.as_graph_def().node}
    assert attributes.determinism_of(dataset) == "false"
    assert attributes.determinism_of(numbers()) == ""


def test_an_optimization_keeps_the_elements_and_the_options():
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = numbers().map(lambda x: x * 2, num_parallel_calls=2).with_options(options)
    optimized = attributes.optimized_dataset(dataset, "make_deterministic")
    assert [int(x) for x in optimized] == list(range(0, 16, 2))
    assert optimized.options().autotune.enabled is False


def test_the_part_of_a_worker():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = numbers().batch(2).with_options(options)
    assert [x.tolist() for x in attributes.sharded_by_file(dataset, 2, 1).as_numpy_iterator()] == [
        [2, 3], [6, 7],
    ]  # fmt: skip


def test_the_specification_of_the_first_replica(two_replicas):
    distributed = two_replicas.experimental_distribute_dataset(numbers().batch(4))
    first = attributes.spec_of_first_replica(distributed.element_spec)
    assert isinstance(first, tf.TensorSpec)
    assert attributes.spec_of_first_replica(first) is first


def test_the_inputs_of_operations():
    assert {"seed", "seed2"} <= set(attributes.input_names("ShuffleDataset"))
    assert attributes.input_names("NoSuchOperation") == []
