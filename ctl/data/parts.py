"""Each worker's own part of the data, in batches of one replica: `train_data_fn`."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data import input_errors, passes, sharding
from ctl.data.batches import Batches, on_cpu, prefetched
from ctl.data.pipeline import check_batch_size
from ctl.distribute.row_partition import num_rows
from ctl.distribute.topology import Topology
from ctl.errors import UsageError


def open_parts(
    make: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    strategy: tf.distribute.Strategy,
    topology: Topology,
    *,
    global_batch_size: int,
    seed: int,
    step: int,
    epochs: float | None,
    total: Callable,
) -> Batches:
    """Opens `train_data_fn` at `step`: each worker's own part of the data, in replica batches.

    `total` adds a vector up over workers, to see that the parts do not overlap. Raises UsageError for
    other than batches of `global_batch_size` / replicas.
    """
    check_batch_size(global_batch_size, topology)
    rows = global_batch_size // topology.num_replicas

    def for_worker(context: Any) -> Any:
        tf.random.set_seed(seed)
        with input_errors.of_method("train_data_fn"):
            source = make(context)
        if not isinstance(source, tf.data.Dataset):
            raise UsageError(
                f"train_data_fn returned a {type(source).__name__}; expected a tf.data.Dataset of "
                "replica batches. Is there a `return`?"
            )
        found = num_rows(source.element_spec)
        if found not in (None, rows):
            raise UsageError(
                f"train_data_fn yields {found} rows at a time; expected {rows}, the batch of one "
                f"replica. Write dataset.batch(input_context.get_per_replica_batch_size("
                f"{global_batch_size}))."
            )
        return source if epochs is None else source.repeat(passes.whole_passes(epochs))

    context = tf.distribute.InputContext(topology.num_workers, topology.worker_index, topology.num_replicas)
    source = for_worker(context)
    sharding.check_parts(source, topology, total)
    endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    local = topology.num_local_replicas
    if local == 1 and on_cpu(strategy):
        iterator = iter(prefetched(source.skip(step)))
    else:
        iterator = iter(
            strategy.distribute_datasets_from_function(lambda c: for_worker(c).skip(step * local))
        )
    return Batches(
        iterator=iterator,
        steps=None,
        ends_unknown=not endless,
        steps_per_epoch=None,
        mode="skip",
        description=f"each worker's own batches of {rows}",
        per_worker=True,
    )
