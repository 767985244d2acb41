"""The training data of workers that go at their own speed: every worker serves batches of its own.

Worker w of W takes batches w, w + W, w + 2 W, ... of the endless order of global batches, so no two
workers train on the same one. How many each comes to take depends on its speed; a resumed run starts
from the number of batches taken by all. A worker that is started again begins its batches anew.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data import dataset_checks, dataset_traits, input_errors, passes, pipeline
from ctl.data.arrays import ArrayData, ExampleNumbers
from ctl.data.batches import Batches, prefetched
from ctl.distribute import parameter_servers
from ctl.errors import UsageError


def open_train_per_worker(
    make: Callable[[int], Any],
    strategy: tf.distribute.Strategy,
    *,
    global_batch_size: int,
    seed: int,
    start_examples: int = 0,
    epochs: float | None = None,
    steps: int | None = None,
) -> Batches:
    """Opens `train_data` on every worker; a dataset is repeated so that it never ends.

    Args:
      steps: that were asked for, or None; then the length of the data decides.

    Raises UsageError for what is not batches of `global_batch_size`, has an unknown length where
    one is needed, or cannot be sent to workers.
    """
    tf.random.set_seed(seed)
    with input_errors.of_method("train_data"):
        source = pipeline.as_source(make(global_batch_size), "train_data", global_batch_size, shuffle=True)
    workers = parameter_servers.num_workers(strategy)
    skipped = start_examples // global_batch_size
    per_epoch: float | None
    if isinstance(source, ArrayData):
        per_epoch = source.steps_per_epoch
        share, mode = _of_arrays(source, workers, seed, start_examples), "indexed"
        description = f"{source.num_examples:,} examples in memory"
    elif isinstance(source, ExampleNumbers):
        per_epoch, mode = None, "indexed"
        share, description = _of_numbers(source, workers, start_examples), "no data: example numbers"
    else:
        dataset_checks.check_dataset(source, "train_data", global_batch_size)
        per_epoch = count = pipeline.cardinality(source)
        share, mode = _of_dataset(source, workers, skipped, global_batch_size), "skip"
        description = pipeline.describe_dataset(source, count, global_batch_size)
    total = None
    if epochs is not None or (steps is None and mode == "skip"):
        if per_epoch is None:
            per_epoch = _counted(source, epochs)
        total = math.ceil((1 if epochs is None else epochs) * per_epoch)
    iterator = iter(parameter_servers.coordinator(strategy).create_per_worker_dataset(share))
    return Batches(
        iterator=iterator,
        steps=None if total is None else max(0, total - skipped),
        ends_unknown=False,
        steps_per_epoch=per_epoch,
        mode=mode,
        description=f"{description}, every batch to one of {workers} workers",
        certain=False,
    )


def _counted(source: Any, epochs: float | None) -> int:
    """Batches of data of unknown length: workers at their own speed cannot find out as they train."""
    if not isinstance(source, tf.data.Dataset) or source.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            "train_data is endless and no number of steps was given. Write train(steps=...), or "
            "--train_steps."
        )
    passes.whole_passes(epochs)
    return passes.length_of(source)


def _of_arrays(source: ArrayData, workers: int, seed: int, start: int) -> Callable:
    def share() -> Any:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        batches = source.replica_batches(
            seed=seed, start=start, total=None, replicas=range(1), num_replicas=1, share=(worker, workers)
        )
        return prefetched(batches)

    return share


def _of_numbers(source: ExampleNumbers, workers: int, start: int) -> Callable:
    def share() -> Any:
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return source.replica_batches(start, range(1), 1, share=(worker, workers))

    return share


def _of_dataset(source: tf.data.Dataset, workers: int, skipped: int, size: int) -> Callable:
    """The dataset goes to workers as a graph: `train_data` runs once, on the chief."""
    policy = source.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    if policy == policies.FILE:
        raise UsageError(
            "train_data is sharded by 'file', which parameter servers do not do: workers go at their "
            "own speed. Leave ctl.shard out; each worker then serves batches of its own."
        )
    endless = pipeline.rows_checked(source, size).repeat()
    endless = endless.skip(skipped) if skipped else endless
    graph = _graph_of(endless)
    spec, shared = endless.element_spec, policy != policies.OFF

    def share() -> Any:
        batches = tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=graph), spec)
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return prefetched(batches.shard(workers, worker) if shared else batches)

    return share


def _graph_of(dataset: tf.data.Dataset) -> tf.Tensor:
    try:
        graph = dataset_traits.graph_of(dataset)
    except (tf.errors.OpError, ValueError) as e:
        raise UsageError(_not_sent(str(e).splitlines()[0][:200])) from None
    if dataset_traits.operations(graph) & dataset_traits.PYTHON_OPS:
        raise UsageError(_not_sent("it calls Python code, e.g. from_generator or py_function"))
    return graph


def _not_sent(why: str) -> str:
    return (
        f"train_data cannot be sent to workers of parameter servers: {why}. Expected TensorFlow "
        "operations only. Write ctl.from_arrays(...), or read files with tf.data, e.g. TFRecordDataset."
    )
