"""Private attributes of `tf.data.Dataset` objects.

Purpose: The order and the content of the examples depend on the datasets that a pipeline consists of.
  TensorFlow exports neither these datasets nor their settings.
Uses: `_inputs`, `_functions`, `_tensors`, `_deterministic`, `_seed`, `_seed2`, `_batch_size`,
  `_num_shards`, `_index` and `_flat_structure` of datasets; `_value_specs` of `PerReplicaSpec`;
  `tensorflow.python.data.ops.dataset_ops._VariantDataset`;
  `tensorflow.python.data.experimental.ops.distribute._AutoShardDataset`;
  `tensorflow.python.framework.op_def_registry.get`.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known.
Switch: none, as these are reads and calls.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry


def inputs_of(dataset: Any) -> list[Any]:
    """Returns the datasets that a dataset reads from; an empty list for other objects."""
    inputs = getattr(dataset, "_inputs", None)
    return [] if inputs is None else list(inputs())


def pipeline_parts(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and all datasets that it is made of."""
    yield dataset
    for part in dataset._inputs():
        yield from pipeline_parts(part)


def functions_of(dataset: Any) -> list[Any]:
    """Returns the concrete functions that a dataset calls."""
    return [wrapper.function for wrapper in dataset._functions()]


def tensors_of(dataset: Any) -> Sequence[Any]:
    """Returns the tensors in a dataset of arrays; an empty sequence for other datasets."""
    tensors: Sequence[Any] = getattr(dataset, "_tensors", ())
    return tensors


def determinism_of(dataset: Any) -> str:
    """Returns the setting `deterministic` of a dataset: "true", "false", "default" or ""."""
    return str(getattr(dataset, "_deterministic", ""))


def seeds_of(dataset: Any, names: Sequence[str]) -> list[int] | None:
    """Returns the seeds of a dataset by the names of its inputs, or None if one is missing."""
    seeds: list[Any] = [getattr(dataset, f"_{name}", None) for name in names]
    if all(isinstance(s, tf.Tensor) and hasattr(s, "numpy") for s in seeds):
        return [int(seed.numpy()) for seed in seeds]
    return None


def batch_size_setting(dataset: Any) -> Any:
    """Returns the batch size of a batched dataset as a tensor or a number, or None."""
    return getattr(dataset, "_batch_size", None)


def shard_of(dataset: Any) -> tuple[Any, Any]:
    """Returns the number of shards and the index of a sharded dataset; None for each missing one."""
    return getattr(dataset, "_num_shards", None), getattr(dataset, "_index", None)


def spec_of_first_replica(spec: Any) -> Any:
    """Returns the specification of a component on the first replica."""
    return getattr(spec, "_value_specs", (spec,))[0]


def optimized_dataset(dataset: Any, optimization: str) -> Any:
    """Returns the dataset after an optimization of tf.data, with the same options."""
    from tensorflow.python.data.ops import dataset_ops

    variant = tf.raw_ops.OptimizeDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        optimizations=tf.constant([optimization]),
        optimization_configs=[],
        **dataset._flat_structure,
    )
    optimized = dataset_ops._VariantDataset(variant, dataset.element_spec)
    optimized.original = dataset  # owns the variables of the functions
    return optimized.with_options(dataset.options())


def sharded_by_file(dataset: Any, num_workers: int, index: int) -> Any:
    """Returns the part of a dataset that TensorFlow gives to a worker."""
    from tensorflow.python.data.experimental.ops import distribute

    return distribute._AutoShardDataset(dataset, num_workers, index)


def input_names(operation_type: str) -> list[str]:
    """Returns the names of the inputs of a type of operation; an empty list for an unknown type."""
    definition = op_def_registry.get(operation_type)
    return [] if definition is None else [argument.name for argument in definition.input_arg]
