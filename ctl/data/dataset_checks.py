"""Checks of a `tf.data.Dataset` before it is opened, and descriptions for logs and messages."""

from typing import Any

import tensorflow as tf
from ctl.data import sharding
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.tensorflow_patches import dataset_attributes
from ctl.tensorflow_patches.dataset_attributes import pipeline_parts


def check_dataset(
    dataset: tf.data.Dataset, name: str, global_batch_size: int | None, topology: Topology | None = None
) -> None:
    """Raises UsageError for a dataset that is not batched, or that the workers cannot share.

    Args:
      dataset: Dataset of global batches.
      name: Method or argument that returned the dataset, for messages.
      global_batch_size: Expected number of rows. None: any number.
      topology: Topology of the job. None: sharing is not checked.
    """
    if topology is not None:
        sharding.check_can_be_shared(dataset, name, topology)
    if dataset.cardinality() == 0:
        raise UsageError(
            f"{name} is empty; expected at least one batch. With drop_remainder=True, fewer "
            "examples than one batch yield no batch."
        )
    if any(type(spec).__name__ == "NoneTensorSpec" for spec in tf.nest.flatten(dataset.element_spec)):
        raise UsageError(
            f"{name} yields {describe_element(dataset.element_spec)}: one of its components is None. "
            "Leave it out, e.g. dataset.map(lambda x, y, _: (x, y))."
        )
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is None or shape.rank is None:
            continue
        if shape.rank == 0:
            raise UsageError(
                f"{name} is not batched: one of its components is a scalar "
                f"({describe_element(dataset.element_spec)}). Write dataset.batch(batch_size)."
            )
        if global_batch_size and shape[0] not in (None, global_batch_size):
            element = describe_element(dataset.element_spec)
            if not is_batched(dataset):
                raise UsageError(
                    f"{name} is not batched: its elements are {element}; expected global batches of "
                    f"{global_batch_size} rows. Write dataset.batch(batch_size)."
                )
            raise UsageError(
                f"{name} yields {shape[0]} rows at a time; expected global batches of "
                f"{global_batch_size}. Write dataset.batch(batch_size) with the batch_size that "
                f"{name} is given, or set --global_batch_size={shape[0]}."
            )


def check_batch_size(global_batch_size: int, topology: Topology, is_divisible: bool = True) -> None:
    """Raises UsageError for a batch size that the replicas cannot share.

    Args:
      global_batch_size: Global batch size (examples).
      topology: Topology of the job.
      is_divisible: True if all shares must be equal. False: each replica must get at least one example.
    """
    r = topology.num_replicas
    if global_batch_size < r or (is_divisible and global_batch_size % r):
        low = max(r, global_batch_size // r * r)
        raise UsageError(
            f"global_batch_size is {global_batch_size}, which {r} replicas cannot split evenly. "
            f"Write a multiple of {r}, e.g. {low} or {low + r}."
        )


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Returns True if the pipeline makes batches, or its source yields arrays of equal length."""
    if any("Batch" in type(part).__name__ for part in pipeline_parts(dataset)):
        return True
    shapes = [getattr(s, "shape", None) for s in tf.nest.flatten(dataset.element_spec)]
    rows = {s[0] if s.rank else "a scalar" for s in shapes if s is not None and s.rank is not None}
    slices_tensors = any(type(part).__name__ == "_TensorSliceDataset" for part in pipeline_parts(dataset))
    return len(rows) == 1 and not slices_tensors


def cardinality(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of batches. None: endless or unknown."""
    n = int(dataset.cardinality())
    return n if n >= 0 else None


def describe_dataset(dataset: Any, count: int | None, batch_size: int) -> str:
    """Returns the length of a dataset for logs: "1,000 batches of 32"."""
    if count is not None:
        return f"{count:,} batches of {batch_size}"
    is_endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    return f"{'endless' if is_endless else 'unknown number of'} batches of {batch_size}"


def describe_element(spec: Any) -> str:
    """Returns the dtypes and shapes of an element for a message, e.g. "float32 (28, 28), int64 ()"."""
    specs = [dataset_attributes.spec_of_first_replica(s) for s in tf.nest.flatten(spec)]
    return ", ".join(f"{s.dtype.name} {s.shape}" if hasattr(s, "dtype") else _name_of(s) for s in specs)


def _name_of(spec: Any) -> str:
    return "None" if type(spec).__name__ == "NoneTensorSpec" else str(spec)
