"""Checks of a `tf.data.Dataset` before it is opened, and descriptions of its elements."""

from typing import Any

import tensorflow as tf
from ctl.data import sharding
from ctl.data.dataset_traits import made_of
from ctl.distribute.topology import Topology
from ctl.errors import UsageError


def check_dataset(
    dataset: tf.data.Dataset, name: str, global_batch_size: int | None, topology: Topology | None = None
) -> None:
    """Raises UsageError for a dataset that is not batched, or that the workers cannot share."""
    if topology is not None:
        sharding.check_can_be_shared(dataset, name, topology)
    if dataset.cardinality() == 0:
        raise UsageError(
            f"{name} is empty; expected at least one batch. Fewer examples than a batch with "
            "drop_remainder=True also give none."
        )
    if any(type(spec).__name__ == "NoneTensorSpec" for spec in tf.nest.flatten(dataset.element_spec)):
        raise UsageError(
            f"{name} yields {tuple_of(dataset.element_spec)}: one of its components is None. Leave it out, "
            "e.g. dataset.map(lambda x, y, _: (x, y))."
        )
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is None or shape.rank is None:
            continue
        if shape.rank == 0:
            raise UsageError(
                f"{name} is not batched: one of its components is a scalar "
                f"({tuple_of(dataset.element_spec)}). Write dataset.batch(batch_size)."
            )
        if global_batch_size and shape[0] not in (None, global_batch_size):
            element = tuple_of(dataset.element_spec)
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


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Returns True if a part of the pipeline makes batches, or its source appears to."""
    if any("Batch" in type(part).__name__ for part in made_of(dataset)):
        return True
    shapes = [getattr(s, "shape", None) for s in tf.nest.flatten(dataset.element_spec)]
    rows = {s[0] if s.rank else "a scalar" for s in shapes if s is not None and s.rank is not None}
    in_memory = any(type(part).__name__ == "_TensorSliceDataset" for part in made_of(dataset))
    return len(rows) == 1 and not in_memory


def tuple_of(spec: Any) -> str:
    """Shapes and types of an element for a message, e.g. "float32 (28, 28), int64 ()"."""
    parts = [getattr(s, "_value_specs", (s,))[0] for s in tf.nest.flatten(spec)]  # of one replica
    return ", ".join(f"{s.dtype.name} {s.shape}" if hasattr(s, "dtype") else _name_of(s) for s in parts)


def _name_of(spec: Any) -> str:
    return "None" if type(spec).__name__ == "NoneTensorSpec" else str(spec)
