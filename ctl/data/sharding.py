"""How several workers share data, and whether what they were given can be shared that way.

By default every worker reads everything and keeps its rows of each global batch, which needs the
same order on all of them. "file" and "off" leave the sharing to TensorFlow and to the user.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data import dataset_traits
from ctl.distribute.row_partition import num_rows
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

_POLICIES = {
    "auto": tf.data.experimental.AutoShardPolicy.AUTO,
    "data": tf.data.experimental.AutoShardPolicy.DATA,
    "file": tf.data.experimental.AutoShardPolicy.FILE,
    "off": tf.data.experimental.AutoShardPolicy.OFF,
}
_COMPARED = 64  # first examples of each worker that are looked at for overlap


def shard(dataset: tf.data.Dataset, policy: str) -> tf.data.Dataset:
    """Says how several workers share `dataset`.

    Args:
      policy: "auto" and "data": every worker reads everything and keeps its rows of each global
        batch; "file": every worker reads files of its own (global batches differ from those of one
        device); "off": every worker uses all the data (it shards or repeats on purpose).
    """
    if policy not in _POLICIES:
        raise UsageError(f"shard policy is {policy!r}; expected one of {', '.join(_POLICIES)}.")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = _POLICIES[policy]
    return dataset.with_options(options)


def by_tensorflow(dataset: tf.data.Dataset, topology: Topology) -> bool:
    """Whether TensorFlow's auto-sharding is to do the work, or nobody."""
    return topology.num_workers > 1 and is_per_worker(dataset)


def is_per_worker(dataset: tf.data.Dataset) -> bool:
    """Whether each of several workers would read data of its own, by "file" or "off"."""
    return _policy(dataset) in ("file", "off")


def iterator(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy, skipped: int) -> Any:
    """Distributes `dataset` by TensorFlow; each worker leaves out its first `skipped` replica batches.

    A skip before the distribution would count whole global batches of each worker, of which
    TensorFlow makes one step per worker.
    """
    distributed = strategy.experimental_distribute_dataset(dataset)
    if skipped:
        parts = distributed._cloned_datasets
        distributed._cloned_datasets = [part.skip(skipped) for part in parts]
    return iter(distributed)


def check_can_be_shared(dataset: tf.data.Dataset, name: str, topology: Topology) -> None:
    """Raises UsageError, on every worker alike, for a dataset that the workers cannot share."""
    if topology.num_workers < 2:
        return
    if _policy(dataset) == "file":
        _check_files(dataset, name, topology.num_workers)
    if is_per_worker(dataset):
        return
    traits = dataset_traits.Traits(dataset)
    if traits.any_order:
        raise UsageError(
            f"{name} may come in any order ({traits.any_order}), so each of {topology.num_workers} workers "
            "would have another one, and their parts of a batch would overlap. Leave deterministic=False "
            'out; or shard by yourself, with ctl.shard(dataset, "off").'
        )
    if traits.unseeded:
        raise UsageError(
            f"{name} {traits.unseeded.cause} and was made before training began, so each of "
            f"{topology.num_workers} workers has another order and their parts of a batch would overlap. "
            f"Write {traits.unseeded.cure}; or make the dataset in train_data, or after "
            "ctl.make_strategy(...), which set the seed."
        )


def check_parts(dataset: tf.data.Dataset, topology: Topology, total: Callable) -> None:
    """Raises UsageError if workers that shard by themselves begin with the same examples.

    Args:
      dataset: this worker's.
      total: adds a vector up over workers; all of them call this.
    """
    if topology.num_workers < 2:
        return
    mine = list(_first_examples(dataset))
    everyone = np.zeros([topology.num_workers, _COMPARED])
    everyone[topology.worker_index, : len(mine)] = mine
    everyone = np.asarray(total(everyone.ravel())).reshape(everyone.shape)
    sets = [set(row[row > 0]) for row in everyone]
    for i, one in enumerate(sets):
        for j in range(i + 1, len(sets)):
            common = len(one & sets[j])
            if common and common >= min(len(one), len(sets[j])) / 2:
                raise UsageError(
                    f"train_data_fn gives workers {i} and {j} the same examples ({common} of their "
                    f"first {min(len(one), len(sets[j]))}). Shard before shuffle and batch: "
                    "dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)."
                )


def _policy(dataset: tf.data.Dataset) -> str:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return next((word for word, value in _POLICIES.items() if value == policy), "auto")


def _check_files(dataset: tf.data.Dataset, name: str, num_workers: int) -> None:
    """TensorFlow finds too few files on one worker only, and the others wait for it."""
    from tensorflow.python.data.experimental.ops import distribute

    try:
        next(iter(distribute._AutoShardDataset(dataset, num_workers, 0)), None)
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as e:
        found = [line for line in str(e).splitlines() if "file" in line.lower()] or [str(e)]
        raise UsageError(
            f"{name} is to be shared by files among {num_workers} workers, and TensorFlow cannot: "
            f"{found[0][:200]} Write at least {num_workers} files, best a multiple of that, or use "
            'ctl.shard(dataset, "data").'
        ) from None


def _first_examples(dataset: tf.data.Dataset) -> Iterator[float]:
    """A number for each of the first examples, equal for equal examples, positive and whole."""
    left = _COMPARED
    rows = num_rows(dataset.element_spec) or 1
    for batch in dataset.take(math.ceil(_COMPARED / rows)):
        parts = [np.asarray(p) for p in tf.nest.flatten(batch, expand_composites=True)]
        for i in range(min(left, *(len(p) for p in parts))):
            text = b"".join(np.ascontiguousarray(p[i]).tobytes() for p in parts)
            left -= 1
            yield float(1 + int.from_bytes(hashlib.sha256(text).digest()[:6], "big"))
