"""Training data of asynchronous workers: each worker reads separate batches.

Worker w of W takes batches w, w + W, w + 2 W, ... of the endless order of global batches, so no two workers
train on the same batch. The number of batches that a worker takes depends on its speed. A resumed run
starts after the number of batches that all workers have taken. A restarted worker starts again with its
first batch.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data import dataset_checks, dataset_traits, input_errors, passes, sources
from ctl.data.arrays import ExampleNumbers
from ctl.data.batches import Batches, prefetched
from ctl.data.indexed import IndexedData
from ctl.data.row_checks import rows_checked
from ctl.distribute import parameter_servers
from ctl.errors import UsageError
from ctl.tensorflow_patches import kernel_seeds


def open_train_per_worker(
    train_data: Callable[[int], Any],
    strategy: tf.distribute.Strategy,
    *,
    global_batch_size: int,
    seed: int,
    start_examples: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
) -> Batches:
    """Opens `train_data` on every worker. A dataset is repeated without end.

    Args:
      train_data: The user's function (global batch size) -> data.
      strategy: Strategy of the job.
      global_batch_size: Examples per step over all replicas.
      seed: Seed of all random numbers.
      start_examples: Number of consumed examples.
      epochs: Number of epochs to train for. None: see `steps`.
      steps: Number of steps to train for. If it and `epochs` are None, the run ends with the data.

    Raises:
      UsageError: The data are not batches of `global_batch_size`, have no length where one is needed, or
        cannot be sent to workers.
    """
    kernel_seeds.set_seed(seed)
    with input_errors.explain_missing_files("train_data"):
        source = sources.as_dataset(
            train_data(global_batch_size), "train_data", global_batch_size, shuffle=True
        )
    num_workers = parameter_servers.num_workers(strategy)
    skipped = start_examples // global_batch_size
    per_epoch: float | None
    if isinstance(source, IndexedData):
        if not source.is_in_memory:
            raise UsageError(_unsendable_message("it reads a source with Python code (ctl.from_source)"))
        per_epoch = source.steps_per_epoch
        open_share, mode = _share_of_arrays(source, num_workers, seed, start_examples), "indexed"
        description = source.describe()
    elif isinstance(source, ExampleNumbers):
        per_epoch, mode = None, "indexed"
        open_share = _share_of_numbers(source, num_workers, start_examples)
        description = "no data: example numbers"
    else:
        dataset_checks.check_dataset(source, "train_data", global_batch_size)
        per_epoch = count = dataset_checks.cardinality(source)
        open_share = _share_of_dataset(source, num_workers, skipped, global_batch_size)
        mode = "skip"
        description = dataset_checks.describe_dataset(source, count, global_batch_size)
    total = None
    if epochs is not None or (steps is None and mode == "skip"):
        if per_epoch is None:
            per_epoch = _count_batches(source, epochs)
        total = math.ceil((1 if epochs is None else epochs) * per_epoch)
    iterator = iter(parameter_servers.coordinator(strategy).create_per_worker_dataset(open_share))
    return Batches(
        iterator=iterator,
        steps=None if total is None else max(0, total - skipped),
        has_unknown_end=False,
        steps_per_epoch=per_epoch,
        mode=mode,
        description=f"{description}, every batch to one of {num_workers} workers",
        is_in_memory=isinstance(source, IndexedData),
        has_exact_counts=False,
    )


def _count_batches(source: Any, epochs: float | None) -> int:
    """Reads data of unknown length and returns the number of batches. Workers cannot count them."""
    if not isinstance(source, tf.data.Dataset) or source.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            "train_data is endless and no number of steps was given. Write train(steps=...), or "
            "--train_steps."
        )
    passes.num_passes(epochs)
    return passes.count_batches(source)


def _share_of_arrays(source: IndexedData, num_workers: int, seed: int, start: int) -> Callable:
    def open_share() -> Any:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        batches = source.replica_batches(
            seed=seed,
            start=start,
            total=None,
            replicas=range(1),
            num_replicas=1,
            share=(worker, num_workers),
        )
        return prefetched(batches)

    return open_share


def _share_of_numbers(source: ExampleNumbers, num_workers: int, start: int) -> Callable:
    def open_share() -> Any:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return source.replica_batches(start, range(1), 1, share=(worker, num_workers))

    return open_share


def _share_of_dataset(source: tf.data.Dataset, num_workers: int, skipped: int, size: int) -> Callable:
    """Sends the dataset to workers as a graph, so that `train_data` runs once, on the chief."""
    policy = source.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    if policy == policies.FILE:
        raise UsageError(
            "train_data is sharded by 'file', which parameter servers do not support, because workers run "
            "at their own speed. Leave ctl.shard out; each worker then reads its own batches."
        )
    repeated = rows_checked(source, size).repeat()
    repeated = repeated.skip(skipped) if skipped else repeated
    graph = _serialize(repeated)
    spec, is_shared = repeated.element_spec, policy != policies.OFF

    def open_share() -> Any:
        batches = tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), spec)
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return prefetched(batches.shard(num_workers, worker) if is_shared else batches)

    return open_share


def _serialize(dataset: tf.data.Dataset) -> tf.Tensor:
    try:
        graph = dataset_traits.serialized_graph(dataset)
    except (tf.errors.OpError, ValueError) as e:
        raise UsageError(_unsendable_message(str(e).splitlines()[0][:200])) from None
    if dataset_traits.operation_types(graph) & dataset_traits.PYTHON_OPS:
        raise UsageError(_unsendable_message("it calls Python code, e.g. from_generator or py_function"))
    return graph


def _unsendable_message(reason: str) -> str:
    return (
        f"train_data cannot be sent to workers of parameter servers: {reason}. Expected TensorFlow "
        "operations only. Write ctl.from_arrays(...), or read files with tf.data, e.g. TFRecordDataset."
    )
