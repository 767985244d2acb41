"""Helpers for scaling a script to several ranks: data sharding, learning rate, number of steps."""

import os
import warnings
from typing import Any

from ctl.errors import UsageError
from ctl.hvd import process
from ctl.tensorflow_patches import dataset_attributes

_METHOD_BY_DATASET = {
    "ShuffleDataset": "shuffle()",
    "RepeatDataset": "repeat()",
    "BatchDataset": "batch()",
    "ParallelBatchDataset": "batch()",
}
_CONSEQUENCE_BY_METHOD = {
    "shuffle()": "read some examples twice and never read other examples.",
    "repeat()": "read all the data.",
    "batch()": "receive whole batches in turn, and some ranks may run one more step.",
}


def shard(dataset: Any) -> Any:
    """Returns every size-th element of a `tf.data.Dataset`, starting with the element of this rank.

    Call this function before other dataset methods. The input must have the same order on all ranks:
    it must not shuffle (ranks would share some examples and omit other examples) and must not repeat.
    Otherwise this function issues a warning.
    """
    for name in _find_methods_before(dataset):
        warnings.warn(_describe_wrong_order(name), stacklevel=2)
    return dataset.shard(process.size(), process.rank())


def check_sharding(dataset: Any) -> list[str]:
    """Checks the sharding of a complete `tf.data.Dataset`. Issues and returns a warning for each error."""
    messages = []
    chain = [dataset, *_list_inputs(dataset)]
    for i, dataset_in_chain in enumerate(chain):
        if _dataset_type(dataset_in_chain) == "ShardDataset":
            messages += [_describe_wrong_order(name) for name in _find_early_methods(chain[i + 1 :])]
            messages += _find_shard_errors(dataset_in_chain)
    if process.size() > 1 and not any(
        _dataset_type(dataset_in_chain) == "ShardDataset" for dataset_in_chain in chain
    ):
        messages.append(
            "the dataset was not sharded: every rank trains on all examples. Call "
            "hvd.shard(dataset) before shuffle(). Do not shard evaluation data."
        )
    for message in messages:
        warnings.warn(message, stacklevel=2)
    return messages


def scale_learning_rate(learning_rate: float) -> float:
    """Returns `learning_rate * size()`, because the global batch is `size()` times as large.

    Increase the rate over the first epochs with `LearningRateWarmupCallback`. Linear scaling does not suit
    all models.
    """
    return learning_rate * process.size()


def scale_steps(steps: int) -> int:
    """Returns `steps // size()`, at least 1: the steps per rank for `steps` of one process.

    Raises UsageError if `steps` is less than 1.
    """
    if steps < 1:
        raise UsageError(f"steps is {steps}; expected at least 1.")
    return max(1, steps // process.size())


def checkpoint_dir(path: str | os.PathLike[str]) -> str | None:
    """Returns `path` on rank 0 and None on other ranks, because several writers would corrupt the files."""
    return os.fspath(path) if process.rank() == 0 else None


def _describe_wrong_order(name: str) -> str:
    method = _METHOD_BY_DATASET[name]
    return (
        f"the dataset was sharded after {method}; shard it first. Otherwise the ranks "
        f"{_CONSEQUENCE_BY_METHOD[method]} Call hvd.shard(dataset) before shuffle(), repeat() and batch()."
    )


def _find_shard_errors(dataset: Any) -> list[str]:
    """Returns the errors in the arguments of `shard(num_shards, index)`, if they are constants."""
    num_shards, index = map(_to_int, dataset_attributes.shard_of(dataset))
    fix = "Call hvd.shard(dataset), or dataset.shard(hvd.size(), hvd.rank())."
    if num_shards is not None and num_shards != process.size():
        return [
            f"the dataset was sharded into {num_shards} parts, but there are {process.size()} ranks. {fix}"
        ]
    if index is not None and index != process.rank():
        local = " (its local rank)" if index == process.local_rank() else ""
        return [
            f"rank {process.rank()} reads part {index}{local} of the dataset, which another rank reads; "
            f"expected part {process.rank()}. {fix}"
        ]
    return []


def _to_int(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _find_methods_before(dataset: Any) -> list[str]:
    return _find_early_methods([dataset, *_list_inputs(dataset)])


def _find_early_methods(chain: list[Any]) -> list[str]:
    return [name for name in _METHOD_BY_DATASET if any(_dataset_type(dataset) == name for dataset in chain)]


def _list_inputs(dataset: Any) -> list[Any]:
    """Returns the direct and indirect inputs of a dataset, nearest first."""
    inputs: list[Any] = []
    pending = [dataset]
    while pending:
        for input_dataset in dataset_attributes.inputs_of(pending.pop(0)):
            inputs.append(input_dataset)
            pending.append(input_dataset)
    return inputs


def _dataset_type(dataset: Any) -> str:
    """Returns the class name of a dataset without version and underscore, such as "ShuffleDataset"."""
    return type(dataset).__name__.lstrip("_").replace("DatasetV1", "Dataset")
