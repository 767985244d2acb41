"""Conversion of a `tf.data.Dataset` of global batches to replica batches, with an exact position.

Every worker builds the same pipeline of global batches and keeps its rows of each batch, see
`ctl/distribute/row_partition.py`. All workers therefore read the same number of batches without agreement
in each step, a short batch is spread evenly, and the global batches equal those of one device. With
`shard(dataset, "file")` or "off", TensorFlow's auto-sharding distributes the dataset instead.

The position is the number of consumed examples. `arrays.ArrayData` starts there at once. Any other dataset
is rebuilt from its seed, and its first batches are skipped.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data import dataset_checks, input_errors, passes, resume_position, row_windows, sharding
from ctl.data.arrays import ArrayData, ExampleNumbers, from_arrays
from ctl.data.batches import (
    Batches,
    ShareExtractor,
    counted_share,
    device_of,
    from_replica_batches,
    prefetched,
)
from ctl.distribute.row_partition import Share, may_be_empty, num_rows, share
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

TOO_MANY_ROWS = "a batch of train_data has more rows than global_batch_size"
UNEQUAL_ROWS = "the components of a batch have unequal numbers of rows"


def open_train_data(
    train_data: Callable[[int], Any],
    strategy: tf.distribute.Strategy,
    topology: Topology,
    *,
    global_batch_size: int,
    seed: int,
    start_examples: int = 0,
    epochs: float | None = None,
    mode: str = "auto",
    position: resume_position.SavedIterator | None = None,
    resumable: bool = True,
    batches_per_pass: int | None = None,
    rows_may_vary: bool = False,
    indexed: bool = False,
) -> Batches:
    """Opens `train_data` at a position.

    Seeds TensorFlow, so that an unseeded shuffle has the same order on every worker and after a resume.

    Args:
      train_data: The user's function (global batch size) -> data.
      strategy: Strategy of the job.
      topology: Topology of the job.
      global_batch_size: Examples per step over all replicas.
      seed: Seed of all random numbers.
      start_examples: Number of consumed examples.
      epochs: Number of epochs, possibly fractional. None: one pass over a dataset; arrays never end.
      mode: Way to reach the position, one of `resume_position.MODES`.
      position: Saved iterator to continue with. None: start from `start_examples`.
      resumable: True if the run has checkpoints.
      batches_per_pass: Number of batches that an earlier run has counted in data of unknown length, or
        `passes.COUNT_AGAIN`. None: unknown.
      rows_may_vary: True to allow batches of any size on one replica.
      indexed: True if a compiled loop gathers the rows of arrays itself.

    Raises:
      UsageError: The data are not batches of `global_batch_size`, or do not fit the other arguments.
    """
    is_resumed = start_examples > 0  # possibly with another number of replicas
    dataset_checks.check_batch_size(global_batch_size, topology, is_divisible=not is_resumed)
    tf.random.set_seed(seed)
    with input_errors.explain_missing_files("train_data"):
        source = as_source(train_data(global_batch_size), "train_data", global_batch_size, shuffle=True)
    _check_sharing(source, global_batch_size, topology, mode)
    if isinstance(source, ArrayData):
        return _open_arrays(source, strategy, topology, seed, start_examples, epochs, indexed)
    if indexed:
        name = "only numbers" if isinstance(source, ExampleNumbers) else "a tf.data.Dataset"
        row_windows.raise_not_in_memory(name)
    if isinstance(source, ExampleNumbers):
        return _open_numbers(source, strategy, topology, start_examples)
    rows_may_vary &= topology.num_replicas == 1
    expected_rows = None if rows_may_vary else global_batch_size
    dataset_checks.check_dataset(source, "train_data", expected_rows, topology)
    source = resume_position.checked_dataset(
        source,
        has_iterator=position is not None,
        is_chief=topology.is_chief,
        resumable=resumable,
        mode=mode,
    )
    job = source, strategy, topology, global_batch_size
    return _open_dataset(*job, start_examples, epochs, position, batches_per_pass, rows_may_vary)


def _open_dataset(
    source: tf.data.Dataset,
    strategy: Any,
    topology: Topology,
    global_batch_size: int,
    start_examples: int,
    epochs: float | None,
    position: resume_position.SavedIterator | None,
    batches_per_pass: int | None,
    rows_may_vary: bool,
) -> Batches:
    count = dataset_checks.cardinality(source)
    is_endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    if epochs is not None and is_endless:
        raise UsageError(
            f"epochs is {epochs}, but train_data is endless. Give steps (--train_steps) instead, or "
            "return a finite dataset without repeat()."
        )
    skipped = start_examples // global_batch_size
    if count is None and not is_endless:
        number = passes.num_passes(epochs)
        if position is None:
            return passes.open_passes(
                source,
                lambda part, skip: _open_part(
                    part, strategy, topology, global_batch_size, skip, None, None, rows_may_vary
                ),
                number=number,
                skipped=skipped,
                batches_per_pass=batches_per_pass,
            )
        source = source.repeat(number)
    steps, description = count, dataset_checks.describe_dataset(source, count, global_batch_size)
    if epochs is not None and count is not None:
        steps = math.ceil(epochs * count)
        # a saved iterator contains the number of repetitions, so a longer run must use the same number
        source = source.repeat(math.ceil(epochs) if position is None else resume_position.MOST_PASSES)
    job = source, strategy, topology, global_batch_size
    batches = _open_part(*job, skipped, steps, position, rows_may_vary)
    return dataclasses.replace(batches, steps_per_epoch=count, description=description)


def _open_part(
    source: tf.data.Dataset,
    strategy: Any,
    topology: Topology,
    global_batch_size: int,
    skipped: int,
    steps: int | None,
    position: resume_position.SavedIterator | None,
    rows_may_vary: bool,
) -> Batches:
    """Opens a dataset that ends after `steps` steps from its start. None: endless, or of unknown length."""
    is_endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    max_rows = None if rows_may_vary else global_batch_size
    dataset = rows_checked(source, max_rows, num_replicas=topology.num_replicas)
    is_sharded_by_tensorflow = sharding.is_by_tensorflow(source, topology)
    if steps is not None:
        steps = max(0, steps - skipped)
    if position is None:
        iterator = _iterator(dataset, strategy, topology, skipped)
    else:
        if not position.variable.numpy():
            dataset = dataset.skip(skipped)
        iterator = iter(prefetched(dataset))
        position.attach(iterator)
    return Batches(
        iterator=iterator,
        steps=None if is_sharded_by_tensorflow else steps,
        has_unknown_end=not is_endless and (steps is None or is_sharded_by_tensorflow),
        steps_per_epoch=None,
        mode="skip" if position is None else "iterator",
        description=dataset_checks.describe_dataset(
            source, dataset_checks.cardinality(source), global_batch_size
        ),
        share_of=_share_of(source, topology) if position is None else _share_extractor(source, topology),
        has_even_shares=_has_even_shares(source, topology),
        is_per_worker=sharding.is_per_worker(source),
    )


def open_eval_data(
    eval_data: Callable[[int], Any],
    strategy: tf.distribute.Strategy,
    topology: Topology,
    *,
    global_batch_size: int,
    is_checked: bool = False,
    name: str = "eval_data",
) -> Batches:
    """Opens `eval_data` for one pass, in which every example occurs once for any number of workers.

    It sets no seed, because `tf.random.set_seed` would discard compiled kernels, including those of
    training.

    Args:
      eval_data: The user's function (global batch size) -> data.
      strategy: Strategy of the evaluation.
      topology: Topology of the job.
      global_batch_size: Argument of `eval_data`. Batches may have any number of rows.
      is_checked: True to omit the checks that read the whole pipeline.
      name: Name of the data for messages.

    Raises:
      UsageError: The data are not batches, or are endless.
    """
    with input_errors.explain_missing_files(name):
        source = as_source(eval_data(global_batch_size), name, global_batch_size, shuffle=False)
    if isinstance(source, ArrayData):
        return _open_arrays(source.in_order(), strategy, topology, 0, 0, 1, False)
    dataset_checks.check_dataset(source, name, None, None if is_checked else topology)
    if source.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            f"{name} is endless; expected one pass over the examples. Remove repeat(), or write take(n)."
        )
    count = None if sharding.is_by_tensorflow(source, topology) else dataset_checks.cardinality(source)
    checked = rows_checked(source, None, num_replicas=topology.num_replicas)
    return Batches(
        iterator=_iterator(checked, strategy, topology),
        steps=count,
        has_unknown_end=count is None,
        steps_per_epoch=count,
        mode="skip",
        description=dataset_checks.describe_dataset(source, count, global_batch_size),
        share_of=_share_of(source, topology),
        has_even_shares=_has_even_shares(source, topology),
    )


def _open_numbers(data: ExampleNumbers, strategy: Any, topology: Topology, start: int) -> Batches:
    def replica_batches(first: int, count: int) -> Any:
        return data.replica_batches(start, range(first, first + count), topology.num_replicas)

    return Batches(
        iterator=from_replica_batches(replica_batches, strategy, topology),
        steps=None,
        has_unknown_end=False,
        steps_per_epoch=None,
        mode="indexed",
        description=f"no data: the numbers of {data.batch_size} examples a step",
    )


def _open_arrays(
    data: ArrayData, strategy: Any, topology: Topology, seed: Any, start: Any, epochs: Any, indexed: bool
) -> Batches:
    total = None if epochs is None else data.num_examples_in(epochs)
    windows = None
    if indexed:
        windows = data.windows(seed=seed, start=start, total=total, device=device_of(strategy))

    def replica_batches(first_replica: int, count: int) -> Any:
        return data.replica_batches(
            seed=seed,
            start=start,
            total=total,
            replicas=range(first_replica, first_replica + count),
            num_replicas=topology.num_replicas,
        )

    order = "shuffled" if data.shuffle else "in order"
    return Batches(
        iterator=windows.iterator if windows else from_replica_batches(replica_batches, strategy, topology),
        steps=None if total is None else max(0, math.ceil((total - start) / data.batch_size)),
        has_unknown_end=False,
        steps_per_epoch=data.steps_per_epoch,
        mode="indexed",
        description=f"{data.num_examples:,} examples in memory, {order}",
        examples=total,
        share_of=counted_share if data.has_counted_shares(start, total, topology.num_replicas) else Share,
        has_even_shares=data.batch_size % topology.num_replicas == 0,
        windows=windows,
    )


def _check_sharing(source: Any, global_batch_size: int, topology: Topology, mode: str) -> None:
    """Raises UsageError if the replicas cannot share the source, or the position cannot be saved."""
    in_memory = isinstance(source, (ArrayData, ExampleNumbers))
    is_per_worker = not in_memory and sharding.is_by_tensorflow(source, topology)
    is_divisible = is_per_worker or isinstance(source, ExampleNumbers)
    dataset_checks.check_batch_size(global_batch_size, topology, is_divisible)
    resume_position.check_mode(mode, in_memory=in_memory, is_per_worker=is_per_worker)


def _iterator(dataset: Any, strategy: Any, topology: Topology, skipped: int = 0) -> Any:
    """Returns an iterator for `strategy.run` over global batches, without the first `skipped` steps."""
    if sharding.is_by_tensorflow(dataset, topology):
        return sharding.distributed_iterator(dataset, strategy, skipped * topology.num_local_replicas)
    if skipped:
        dataset = dataset.skip(skipped)
    is_counted = _has_counted_shares(dataset, topology)

    def element(batch: tuple, replica: int) -> Any:
        part = share(_joined(batch), replica, topology.num_replicas, counted=is_counted)
        return tuple(part) if is_counted else part.rows

    def replica_batches(first_replica: int, count: int) -> Any:
        if topology.num_replicas == 1:
            return dataset

        @tf.autograph.experimental.do_not_convert
        def split(*batch: Any) -> Any:
            replicas = range(first_replica, first_replica + count)
            pieces = [tf.data.Dataset.from_tensors(element(batch, r)) for r in replicas]
            return functools.reduce(lambda a, b: a.concatenate(b), pieces)

        @tf.autograph.experimental.do_not_convert
        def only_share(*batch: Any) -> Any:
            return element(batch, first_replica)

        return dataset.map(only_share) if count == 1 else dataset.flat_map(split)

    return from_replica_batches(replica_batches, strategy, topology)


def _share_of(source: tf.data.Dataset, topology: Topology) -> Callable[[Any], Share]:
    return counted_share if _has_counted_shares(source, topology) else Share


def _share_extractor(source: tf.data.Dataset, topology: Topology) -> Callable[[Any], Share]:
    num_local, is_counted = topology.num_local_replicas, _has_counted_shares(source, topology)
    return ShareExtractor(topology.worker_index * num_local, num_local, topology.num_replicas, is_counted)


def _joined(components: tuple) -> Any:
    """Returns a batch that `Dataset.map` has spread over arguments."""
    return components[0] if len(components) == 1 else components


def as_source(source: Any, name: str, batch_size: int, shuffle: bool) -> Any:
    """Converts the return value of the user's method `name`: arrays to `ArrayData`. Raises UsageError."""
    if isinstance(source, (tf.data.Dataset, ArrayData, ExampleNumbers)):
        return source
    if source is None:
        raise UsageError(
            f"{name} returned None; expected a tf.data.Dataset of batches, ctl.from_arrays(...), or "
            "arrays. Is there a `return`?"
        )
    if all(isinstance(a, (np.ndarray, tf.Tensor)) for a in tf.nest.flatten(source)):
        return from_arrays(source, batch_size, shuffle=shuffle)
    raise UsageError(
        f"{name} returned a {type(source).__name__}; expected a tf.data.Dataset of batches, "
        "ctl.from_arrays(...), or NumPy arrays (also in a tuple or dictionary). For a generator "
        "write tf.data.Dataset.from_generator(...)."
    )


def rows_checked(
    dataset: tf.data.Dataset, max_rows: int | None, *, num_replicas: int = 1
) -> tf.data.Dataset:
    """Returns the dataset with checks of rows that are not static. They raise when a batch is read.

    On several replicas, which each get some rows of every component, all components must have the same
    number of rows.

    Args:
      dataset: Dataset of batches.
      max_rows: Maximum number of rows of a batch. None: any number.
      num_replicas: Number of replicas that share a batch.
    """
    components = tf.nest.flatten(dataset.element_spec)
    static = [num_rows(spec) for spec in components]
    should_check_max = max_rows is not None and not isinstance(static[0], int)
    should_check_equal = num_replicas > 1 and (None in static or len(set(static)) > 1)
    if not should_check_max and not should_check_equal:
        return dataset

    @tf.autograph.experimental.do_not_convert
    def check(*batch: Any) -> Any:
        counts = [tf.cast(num_rows(part), tf.int64) for part in tf.nest.flatten(_joined(batch))]
        checks = []
        if should_check_equal and len(counts) > 1:
            message = f"{UNEQUAL_ROWS} ({dataset_checks.describe_element(dataset.element_spec)})"
            checks.append(tf.debugging.assert_equal(tf.stack(counts[1:]), counts[0], message))
        with tf.control_dependencies(checks):
            limit = tf.constant(max_rows or 0, tf.int64)
        if should_check_max:
            message = f"{TOO_MANY_ROWS} {max_rows}"
            checks.append(tf.debugging.assert_less_equal(counts[0], limit, message))
        with tf.control_dependencies(checks):
            return tf.nest.map_structure(tf.identity, _joined(batch), expand_composites=True)

    options = dataset.options()
    return dataset.map(check).with_options(options)


def _has_counted_shares(dataset: Any, topology: Topology) -> bool:
    """Returns True if a share may be empty, so that elements include the number of real rows."""
    rows = num_rows(dataset.element_spec)
    return not sharding.is_by_tensorflow(dataset, topology) and may_be_empty(rows, topology.num_replicas)


def _has_even_shares(dataset: Any, topology: Topology) -> bool:
    rows = num_rows(dataset.element_spec)
    if rows is None or rows % topology.num_replicas:
        return False
    return not sharding.is_by_tensorflow(dataset, topology)
