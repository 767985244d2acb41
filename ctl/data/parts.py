"""Separate data of each worker, in replica batches: `train_data_fn`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data import input_errors, passes, sharding
from ctl.data.batches import Batches, is_on_cpu, prefetched
from ctl.data.dataset_checks import check_batch_size
from ctl.distribute.row_partition import num_rows
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.tensorflow_patches import kernel_seeds


def open_parts(
    train_data_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    strategy: tf.distribute.Strategy,
    topology: Topology,
    *,
    global_batch_size: int,
    seed: int,
    step: int,
    epochs: float | None,
    sum_over_workers: Callable,
) -> Batches:
    """Opens the data of this worker.

    Args:
      train_data_fn: The user's function (input context) -> dataset of replica batches.
      strategy: Strategy of the job.
      topology: Topology of the job.
      global_batch_size: Examples per step over all replicas.
      seed: Seed of all random numbers.
      step: Number of completed steps.
      epochs: Number of passes over the data. None: one.
      sum_over_workers: Function that sums a vector over workers, to check that the parts do not overlap.

    Raises:
      UsageError: Batches do not have `global_batch_size / num_replicas` rows, or the parts overlap.
    """
    check_batch_size(global_batch_size, topology)
    rows = global_batch_size // topology.num_replicas

    def for_worker(context: Any) -> Any:
        kernel_seeds.set_seed(seed)
        with input_errors.explain_missing_files("train_data_fn"):
            source = train_data_fn(context)
        _check_replica_batches(source, rows, global_batch_size)
        return source if epochs is None else source.repeat(passes.num_passes(epochs))

    context = tf.distribute.InputContext(topology.num_workers, topology.worker_index, topology.num_replicas)
    source = for_worker(context)
    sharding.check_parts_differ(source, topology, sum_over_workers)
    is_endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    local = topology.num_local_replicas
    if local == 1 and is_on_cpu(strategy):
        iterator = iter(prefetched(source.skip(step)))
    else:
        iterator = iter(
            strategy.distribute_datasets_from_function(lambda c: for_worker(c).skip(step * local))
        )
    return Batches(
        iterator=iterator,
        steps=None,
        has_unknown_end=not is_endless,
        steps_per_epoch=None,
        mode="skip",
        description=f"each worker's own batches of {rows}",
        is_per_worker=True,
    )


def _check_replica_batches(source: Any, rows: int, global_batch_size: int) -> None:
    if not isinstance(source, tf.data.Dataset):
        raise UsageError(
            f"train_data_fn returned a {type(source).__name__}; expected a tf.data.Dataset of "
            "replica batches. Is there a `return`?"
        )
    static_rows = num_rows(source.element_spec)
    if static_rows not in (None, rows):
        raise UsageError(
            f"train_data_fn yields {static_rows} rows at a time; expected {rows}, the batch of one "
            f"replica. Write dataset.batch(input_context.get_per_replica_batch_size({global_batch_size}))."
        )
