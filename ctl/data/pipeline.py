"""A `tf.data.Dataset` of global batches becomes each replica's batches, with an exact position.

Every worker builds the same pipeline of global batches and keeps its own rows of each (shares.py).
So all workers see the same number of batches (no agreement per step), a short batch is spread
evenly, and the global batches are those of one device. `shard(dataset, "file")` and "off" hand the
work to TensorFlow's auto-sharding instead.

The position is the number of examples consumed: `arrays.ArrayData` jumps there, any other dataset
is rebuilt from its seed and skipped.
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
from ctl.data.batches import Batches, Cut, counted, device_of, from_replica_batches, prefetched
from ctl.distribute.row_partition import Share, may_be_empty, num_rows, share
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

TOO_MANY_ROWS = "a batch of train_data has more rows than global_batch_size"
UNEQUAL_ROWS = "the components of a batch have unequal numbers of rows"


def open_train_data(
    make: Callable[[int], Any],
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
    """Opens `train_data` at `start_examples` consumed examples, or where `position` was saved.

    `batches_per_pass`, if an earlier run has counted data of unknown length. `indexed`: by the
    compiled loop itself.

    Seeds TensorFlow first, so an unseeded shuffle is the same on every worker and after a resume.
    Raises UsageError for anything that is not batches of `global_batch_size`, which on one replica
    counts steps only if `rows_may_vary`.
    """
    # a job that goes on may have any number of workers
    check_batch_size(global_batch_size, topology, whole=not start_examples)
    tf.random.set_seed(seed)
    with input_errors.of_method("train_data"):
        source = as_source(make(global_batch_size), "train_data", global_batch_size, shuffle=True)
    _check_sharing(source, global_batch_size, topology, mode)
    if isinstance(source, ArrayData):
        return _open_arrays(source, strategy, topology, seed, start_examples, epochs, indexed)
    if indexed:
        row_windows.refuse("only numbers" if isinstance(source, ExampleNumbers) else "a tf.data.Dataset")
    if isinstance(source, ExampleNumbers):
        return _open_numbers(source, strategy, topology, start_examples)
    rows_may_vary &= topology.num_replicas == 1
    dataset_checks.check_dataset(
        source, "train_data", None if rows_may_vary else global_batch_size, topology
    )
    how = "skip" if position is None else "iterator"
    source = resume_position.checked_dataset(source, how, is_chief=topology.is_chief, resumable=resumable)
    where = source, strategy, topology, global_batch_size
    return _open_dataset(*where, start_examples, epochs, position, batches_per_pass, rows_may_vary)


def _open_dataset(
    source: tf.data.Dataset,
    strategy: Any,
    topology: Topology,
    global_batch_size: int,
    start_examples: int,
    epochs: float | None,
    position: resume_position.SavedIterator | None,
    known: int | None,
    rows_may_vary: bool,
) -> Batches:
    count = cardinality(source)
    endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    if epochs is not None and endless:
        raise UsageError(
            "epochs were asked for, but train_data is endless. Give steps (--train_steps) instead, or "
            "return a finite dataset without repeat()."
        )
    skipped = start_examples // global_batch_size
    if count is None and not endless:
        number = passes.whole_passes(epochs)
        if position is None:
            return passes.open_passes(
                source,
                lambda part, skip: _open_part(
                    part, strategy, topology, global_batch_size, skip, None, None, rows_may_vary
                ),
                number=number,
                skipped=skipped,
                known=known,
            )
        source = source.repeat(number)
    steps, description = count, describe_dataset(source, count, global_batch_size)
    if epochs is not None and count is not None:
        steps = math.ceil(epochs * count)
        # a saved iterator knows how often its data are repeated: a longer run needs the same number
        source = source.repeat(math.ceil(epochs) if position is None else resume_position.MOST_PASSES)
    where = source, strategy, topology, global_batch_size
    opened = _open_part(*where, skipped, steps, position, rows_may_vary)
    return dataclasses.replace(opened, steps_per_epoch=count, description=description)


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
    """Opens a dataset that ends after `steps` steps in all, or at a time that nobody knows, or never."""
    endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    most_rows = None if rows_may_vary else global_batch_size
    dataset = rows_checked(source, most_rows, num_replicas=topology.num_replicas)
    if steps is not None:
        steps = max(0, steps - skipped)
    if position is None:
        iterator = _iterator(dataset, strategy, topology, skipped)
    else:
        if not position.variable.numpy():
            dataset = dataset.skip(skipped)
        iterator = iter(prefetched(dataset))
        position.opened(iterator)
    return Batches(
        iterator=iterator,
        steps=None if sharding.by_tensorflow(source, topology) else steps,
        ends_unknown=(not endless and steps is None)
        or (sharding.by_tensorflow(source, topology) and not endless),
        steps_per_epoch=None,
        mode="skip" if position is None else "iterator",
        description=describe_dataset(source, cardinality(source), global_batch_size),
        share_of=_share_of(source, topology) if position is None else _cut(source, topology),
        even=_even(source, topology),
        per_worker=sharding.is_per_worker(source),
    )


def open_eval_data(
    make: Callable[[int], Any],
    strategy: tf.distribute.Strategy,
    topology: Topology,
    *,
    global_batch_size: int,
    is_known: bool = False,
) -> Batches:
    """Opens `eval_data` for one pass; every example comes once, whatever the batch or the workers.

    `is_known` leaves out the checks that read the whole pipeline.

    Nothing is seeded here: that would throw away TensorFlow's compiled kernels, training's too.
    """
    with input_errors.of_method("eval_data"):
        source = as_source(make(global_batch_size), "eval_data", global_batch_size, shuffle=False)
    if isinstance(source, ArrayData):
        return _open_arrays(source.in_order(), strategy, topology, 0, 0, 1, False)
    dataset_checks.check_dataset(source, "eval_data", None, None if is_known else topology)
    if source.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            "eval_data is endless; expected one pass over the examples. Remove repeat(), or write "
            "eval_data(...).take(n)."
        )
    count = None if sharding.by_tensorflow(source, topology) else cardinality(source)
    checked = rows_checked(source, None, num_replicas=topology.num_replicas)
    return Batches(
        iterator=_iterator(checked, strategy, topology),
        steps=count,
        ends_unknown=count is None,
        steps_per_epoch=count,
        mode="skip",
        description=describe_dataset(source, count, global_batch_size),
        share_of=_share_of(source, topology),
        even=_even(source, topology),
    )


def _open_numbers(data: ExampleNumbers, strategy: Any, topology: Topology, start: int) -> Batches:
    def replica_batches(first: int, count: int) -> Any:
        return data.replica_batches(start, range(first, first + count), topology.num_replicas)

    return Batches(
        iterator=from_replica_batches(replica_batches, strategy, topology),
        steps=None,
        ends_unknown=False,
        steps_per_epoch=None,
        mode="indexed",
        description=f"no data: the numbers of {data.batch_size} examples a step",
    )


def _open_arrays(
    data: ArrayData, strategy: Any, topology: Topology, seed: Any, start: Any, epochs: Any, indexed: bool
) -> Batches:
    total = None if epochs is None else data.examples_of(epochs)
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
        ends_unknown=False,
        steps_per_epoch=data.steps_per_epoch,
        mode="indexed",
        description=f"{data.num_examples:,} examples in memory, {order}",
        examples=total,
        share_of=counted if data.counts_shares(start, total, topology.num_replicas) else Share,
        even=data.batch_size % topology.num_replicas == 0,
        windows=windows,
    )


def _check_sharing(source: Any, global_batch_size: int, topology: Topology, mode: str) -> None:
    """Raises UsageError where the replicas cannot share the source, or the position cannot be kept."""
    in_memory = isinstance(source, (ArrayData, ExampleNumbers))
    own_files = not in_memory and sharding.by_tensorflow(source, topology)
    check_batch_size(global_batch_size, topology, whole=own_files or isinstance(source, ExampleNumbers))
    resume_position.check_mode(mode, in_memory=in_memory, own_files=own_files)


def _iterator(dataset: Any, strategy: Any, topology: Topology, skipped: int = 0) -> Any:
    """Feeds `strategy.run` from the dataset of global batches, without the first `skipped` steps."""
    if sharding.by_tensorflow(dataset, topology):
        return sharding.iterator(dataset, strategy, skipped * topology.num_local_replicas)
    if skipped:
        dataset = dataset.skip(skipped)
    is_counted = _counted(dataset, topology)

    def element(batch: tuple, replica: int) -> Any:
        cut = share(_one(batch), replica, topology.num_replicas, counted=is_counted)
        return tuple(cut) if is_counted else cut.rows

    def replica_batches(first_replica: int, count: int) -> Any:
        if topology.num_replicas == 1:
            return dataset

        @tf.autograph.experimental.do_not_convert
        def split(*batch: Any) -> Any:
            replicas = range(first_replica, first_replica + count)
            pieces = [tf.data.Dataset.from_tensors(element(batch, r)) for r in replicas]
            return functools.reduce(lambda a, b: a.concatenate(b), pieces)

        @tf.autograph.experimental.do_not_convert
        def own_share(*batch: Any) -> Any:
            return element(batch, first_replica)

        return dataset.map(own_share) if count == 1 else dataset.flat_map(split)

    return from_replica_batches(replica_batches, strategy, topology)


def _share_of(source: tf.data.Dataset, topology: Topology) -> Callable[[Any], Share]:
    return counted if _counted(source, topology) else Share


def _cut(source: tf.data.Dataset, topology: Topology) -> Callable[[Any], Share]:
    local = topology.num_local_replicas
    return Cut(topology.worker_index * local, local, topology.num_replicas, _counted(source, topology))


def _one(batch: tuple) -> Any:
    """`Dataset.map` spreads tuples over arguments; this undoes it."""
    return batch[0] if len(batch) == 1 else batch


def as_source(source: Any, name: str, batch_size: int, shuffle: bool) -> Any:
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
    dataset: tf.data.Dataset, most_rows: int | None, *, num_replicas: int = 1
) -> tf.data.Dataset:
    """Returns the dataset with checks of rows that are not static, which raise as a batch is read.

    No batch may have more than `most_rows` rows (None: any number). On several replicas, which each get
    some of the rows of every component, all components have the same number.
    """
    components = tf.nest.flatten(dataset.element_spec)
    static = [num_rows(spec) for spec in components]
    checks_most = most_rows is not None and not isinstance(static[0], int)
    checks_equal = num_replicas > 1 and (None in static or len(set(static)) > 1)
    if not checks_most and not checks_equal:
        return dataset

    @tf.autograph.experimental.do_not_convert
    def check(*batch: Any) -> Any:
        counts = [tf.cast(num_rows(part), tf.int64) for part in tf.nest.flatten(_one(batch))]
        checks = []
        if checks_equal and len(counts) > 1:
            message = f"{UNEQUAL_ROWS} ({dataset_checks.tuple_of(dataset.element_spec)})"
            checks.append(tf.debugging.assert_equal(tf.stack(counts[1:]), counts[0], message))
        with tf.control_dependencies(checks):
            most = tf.constant(most_rows or 0, tf.int64)
        if checks_most:
            message = f"{TOO_MANY_ROWS} {most_rows}"
            checks.append(tf.debugging.assert_less_equal(counts[0], most, message))
        with tf.control_dependencies(checks):
            return tf.nest.map_structure(tf.identity, _one(batch), expand_composites=True)

    options = dataset.options()
    return dataset.map(check).with_options(options)


def check_batch_size(global_batch_size: int, topology: Topology, whole: bool = True) -> None:
    """Raises UsageError for a batch size that the replicas cannot share; `whole`: in equal parts."""
    r = topology.num_replicas
    if global_batch_size < r or (whole and global_batch_size % r):
        low = max(r, global_batch_size // r * r)
        raise UsageError(
            f"global_batch_size is {global_batch_size}, which {r} replicas cannot split evenly. "
            f"Write a multiple of {r}, e.g. {low} or {low + r}."
        )


def cardinality(dataset: tf.data.Dataset) -> int | None:
    n = int(dataset.cardinality())
    return n if n >= 0 else None


def _counted(dataset: Any, topology: Topology) -> bool:
    rows = num_rows(dataset.element_spec)
    return not sharding.by_tensorflow(dataset, topology) and may_be_empty(rows, topology.num_replicas)


def _even(dataset: Any, topology: Topology) -> bool:
    """Whether global batches of static size fall into equal shares."""
    rows = num_rows(dataset.element_spec)
    if rows is None or rows % topology.num_replicas:
        return False
    return not sharding.by_tensorflow(dataset, topology)


def describe_dataset(dataset: Any, count: int | None, batch_size: int) -> str:
    if count is not None:
        return f"{count:,} batches of {batch_size}"
    endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    return f"{'endless' if endless else 'unknown number of'} batches of {batch_size}"
