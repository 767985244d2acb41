"""Helpers for scaling a script to several ranks: data sharding, learning rate, number of steps."""

import os
import warnings
from typing import Any

from ctl.errors import UsageError
from ctl.hvd import process
from ctl.tensorflow_patches import dataset_attributes

_TOO_EARLY = {
    "ShuffleDataset": "shuffle()",
    "RepeatDataset": "repeat()",
    "BatchDataset": "batch()",
    "ParallelBatchDataset": "batch()",
}
_FOLLOWS = {
    "shuffle()": "see some examples twice and others never.",
    "repeat()": "read all the data.",
    "batch()": "take whole batches in turn, and some may get one step more than others.",
}


def shard(dataset: Any) -> Any:
    """Returns this rank's elements of a `tf.data.Dataset`, every size-th. Call it before other methods.

    Each rank takes 1/size of the *same* order, so the input dataset must not shuffle (ranks would share
    some examples and omit others) and must not repeat. Otherwise issues a warning.
    """
    for name in _before(dataset):
        warnings.warn(_sentence(name), stacklevel=2)
    return dataset.shard(process.size(), process.rank())


def check_sharding(dataset: Any) -> list[str]:
    """Returns the errors in the sharding of a finished `tf.data.Dataset`, and issues a warning for each."""
    found = []
    chain = [dataset, *_inputs(dataset)]
    for i, one in enumerate(chain):
        if _kind(one) == "ShardDataset":
            found += [_sentence(name) for name in _too_early(chain[i + 1 :])]
            found += _wrong_share(one)
    if process.size() > 1 and not any(_kind(one) == "ShardDataset" for one in chain):
        found.append(
            "the dataset was not sharded: every rank trains on all of it. Call "
            "hvd.shard(dataset) before shuffle() (data to evaluate on stays whole)."
        )
    for text in found:
        warnings.warn(text, stacklevel=2)
    return found


def scale_learning_rate(learning_rate: float) -> float:
    """Returns `learning_rate * size()`, because the global batch is `size()` times as large.

    Increase it over the first epochs with `LearningRateWarmupCallback`. Scaling does not suit all models.
    """
    return learning_rate * process.size()


def scale_steps(steps: int) -> int:
    """Returns steps per rank for `steps` of one process: rounded down, at least 1. Raises UsageError."""
    if steps < 1:
        raise UsageError(f"steps is {steps}; expected at least 1.")
    return max(1, steps // process.size())


def checkpoint_dir(path: str | os.PathLike[str]) -> str | None:
    """Returns `path` on rank 0 and None on other ranks: several writers would corrupt the files."""
    return os.fspath(path) if process.rank() == 0 else None


def _sentence(name: str) -> str:
    what = _TOO_EARLY[name]
    return (
        f"the dataset was sharded after {what}; shard first, else ranks {_FOLLOWS[what]} Write dataset = "
        "hvd.shard(dataset), and shuffle(), repeat() and batch() after it."
    )


def _wrong_share(dataset: Any) -> list[str]:
    """Returns the errors in the arguments of `shard(num_shards, index)`, if they are constants."""
    count, index = map(_number, dataset_attributes.shard_of(dataset))
    cure = "Write hvd.shard(dataset), or dataset.shard(hvd.size(), hvd.rank())."
    if count is not None and count != process.size():
        return [f"the dataset was sharded into {count} parts, but there are {process.size()} ranks. {cure}"]
    if index is not None and index != process.rank():
        local = " (that is its local rank)" if index == process.local_rank() else ""
        return [
            f"rank {process.rank()} takes part {index} of the dataset{local}, which is another rank's "
            f"too. {cure}"
        ]
    return []


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _before(dataset: Any) -> list[str]:
    return _too_early([dataset, *_inputs(dataset)])


def _too_early(chain: list[Any]) -> list[str]:
    return [name for name in _TOO_EARLY if any(_kind(one) == name for one in chain)]


def _inputs(dataset: Any) -> list[Any]:
    """Returns the direct and indirect inputs of a dataset, nearest first."""
    found: list[Any] = []
    waiting = [dataset]
    while waiting:
        for one in dataset_attributes.inputs_of(waiting.pop(0)):
            found.append(one)
            waiting.append(one)
    return found


def _kind(dataset: Any) -> str:
    """Returns `ShuffleDataset` for `_ShuffleDataset`, including the variants of the class in TensorFlow."""
    return type(dataset).__name__.lstrip("_").replace("DatasetV1", "Dataset")
