"""Sharding of datasets over workers, and checks that a dataset supports it.

By default every worker reads all data and keeps its rows of each global batch, which requires the same
order on all workers. With "file" TensorFlow shards the dataset. With "off" the user does.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data import dataset_traits
from ctl.distribute.row_partition import num_rows
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.setting_values import check_choice
from ctl.tensorflow_patches import dataset_attributes, skipped_batches

_POLICIES = {
    "auto": tf.data.experimental.AutoShardPolicy.AUTO,
    "data": tf.data.experimental.AutoShardPolicy.DATA,
    "file": tf.data.experimental.AutoShardPolicy.FILE,
    "off": tf.data.experimental.AutoShardPolicy.OFF,
}
_NUM_COMPARED = 64  # first examples of each worker that are compared with those of other workers


def shard(dataset: tf.data.Dataset, policy: str) -> tf.data.Dataset:
    """Sets the way in which several workers share a dataset.

    Args:
      dataset: Dataset of global batches.
      policy: "auto" or "data": every worker reads all data and keeps its rows of each global batch. "file":
        every worker reads separate files, so global batches differ from those of one device. "off": every
        worker uses its whole dataset, which the user shards or repeats on purpose.

    Returns:
      The dataset with the policy in its options.

    Raises:
      UsageError: The policy is unknown, or `dataset` is another object.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise UsageError(f"shard got {dataset!r:.80}; expected a tf.data.Dataset.")
    check_choice("shard policy", policy, tuple(_POLICIES))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = _POLICIES[policy]
    return dataset.with_options(options)


def is_by_tensorflow(dataset: tf.data.Dataset, topology: Topology) -> bool:
    """Returns True if TensorFlow distributes the dataset over workers: policies "file" and "off"."""
    return topology.num_workers > 1 and is_per_worker(dataset)


def is_per_worker(dataset: tf.data.Dataset) -> bool:
    """Returns True if each of several workers would read separate data: policies "file" and "off"."""
    return _policy(dataset) in ("file", "off")


def distributed_iterator(dataset: tf.data.Dataset, strategy: tf.distribute.Strategy, skipped: int) -> Any:
    """Returns an iterator of the dataset that TensorFlow distributes.

    Each worker skips its first `skipped` replica batches. A skip before the distribution would count global
    batches of each worker, and TensorFlow makes one step per worker of each of them.
    """
    distributed = strategy.experimental_distribute_dataset(dataset)
    skipped_batches.skip_replica_batches(distributed, skipped)
    return iter(distributed)


def check_can_be_shared(dataset: tf.data.Dataset, name: str, topology: Topology) -> None:
    """Raises UsageError for a dataset that the workers cannot share. All workers raise the same error.

    Args:
      dataset: Dataset of global batches.
      name: Method that returned the dataset, for messages.
      topology: Topology of the job.
    """
    if topology.num_workers < 2:
        return
    if _policy(dataset) == "file":
        _check_files(dataset, name, topology.num_workers)
    if is_per_worker(dataset):
        return
    traits = dataset_traits.Traits(dataset)
    if traits.unordered_reason:
        raise UsageError(
            f"{name} may come in any order ({traits.unordered_reason}), so each of {topology.num_workers} "
            "workers would have a different order, and their parts of a batch would overlap. Remove "
            "deterministic=False or the tf.data service, or give each worker its own data and write "
            'ctl.shard(dataset, "off").'
        )
    if traits.unseeded:
        raise UsageError(
            f"{name} {traits.unseeded.cause} and was made before training began, so each of "
            f"{topology.num_workers} workers has a different order and parts of a batch would overlap. "
            f"Write {traits.unseeded.fix}; or make the dataset in train_data, or after "
            "ctl.make_strategy(...), which set the seed."
        )


def check_parts_differ(dataset: tf.data.Dataset, topology: Topology, sum_over_workers: Callable) -> None:
    """Raises UsageError if the datasets of two workers start with the same examples. All workers call it.

    Args:
      dataset: Dataset of this worker.
      topology: Topology of the job.
      sum_over_workers: Function that sums a vector over workers.
    """
    if topology.num_workers < 2:
        return
    hashes = list(_hash_examples(dataset))
    rows = np.zeros([topology.num_workers, _NUM_COMPARED])
    rows[topology.worker_index, : len(hashes)] = hashes
    rows = np.asarray(sum_over_workers(rows.ravel())).reshape(rows.shape)
    hash_sets = [set(row[row > 0]) for row in rows]
    for (i, first), (j, second) in itertools.combinations(enumerate(hash_sets), 2):
        num_common, num_compared = len(first & second), min(len(first), len(second))
        if num_common and num_common >= num_compared / 2:
            raise UsageError(
                f"train_data_fn gives workers {i} and {j} the same examples ({num_common} of their "
                f"first {num_compared}). Shard before shuffle and batch: "
                "dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)."
            )


def _policy(dataset: tf.data.Dataset) -> str:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return next((name for name, value in _POLICIES.items() if value == policy), "auto")


def _check_files(dataset: tf.data.Dataset, name: str, num_workers: int) -> None:
    """Raises UsageError if there are too few files.

    TensorFlow raises its error on one worker only, and the remaining workers would wait for that worker.
    """
    try:
        next(iter(dataset_attributes.sharded_by_file(dataset, num_workers, 0)), None)
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as e:
        reasons = [line for line in str(e).splitlines() if "file" in line.lower()] or [str(e)]
        raise UsageError(
            f"TensorFlow cannot shard {name} by files over {num_workers} workers: "
            f"{reasons[0][:200]} Write at least {num_workers} files, preferably a multiple of that, or use "
            'ctl.shard(dataset, "data").'
        ) from None


def _hash_examples(dataset: tf.data.Dataset) -> Iterator[float]:
    """Yields a hash of each of the first examples: a positive integer, as a float."""
    remaining = _NUM_COMPARED
    rows = num_rows(dataset.element_spec) or 1
    for batch in dataset.take(math.ceil(_NUM_COMPARED / rows)):
        parts = [np.asarray(p) for p in tf.nest.flatten(batch, expand_composites=True)]
        for i in range(min(remaining, *(len(p) for p in parts))):
            content = b"".join(np.ascontiguousarray(p[i]).tobytes() for p in parts)
            remaining -= 1
            yield float(1 + int.from_bytes(hashlib.sha256(content).digest()[:6], "big"))
