"""A `tf.data.Dataset` of global batches becomes each replica's batches, with an exact position.

Every worker builds the same pipeline of global batches and keeps its own rows of each: replica r of
R gets rows n*r//R to n*(r+1)//R of a batch of n. So all workers see the same number of batches
(no agreement per step), a short batch is spread evenly, and the global batches are those of one
device. `shard(dataset, "file")` and "off" hand the work to TensorFlow's auto-sharding instead.

The position is the number of examples consumed: `arrays.ArrayData` jumps there, any other dataset
is rebuilt from its seed and skipped.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.arrays import ArrayData, from_arrays
from ctl.errors import UsageError
from ctl.strategies import Placement, placement, word_of

TOO_MANY_ROWS = "a batch of train_data has more rows than global_batch_size"
_POLICIES = {
    "auto": tf.data.experimental.AutoShardPolicy.AUTO,
    "data": tf.data.experimental.AutoShardPolicy.DATA,
    "file": tf.data.experimental.AutoShardPolicy.FILE,
    "off": tf.data.experimental.AutoShardPolicy.OFF,
}


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


@dataclass(frozen=True)
class Batches:
    """An open source of replica batches.

    Attributes:
      iterator: what the graph loop takes; its type is the same for every opening of one source.
      steps: global batches from here to the end of the data; None: endless or unknown.
      examples: from the start of the data to its end, where that is not a matter of whole batches.
      ends_unknown: the data ends, nobody knows when: the loop asks before every step.
      steps_per_epoch: None if unknown; not always whole.
      mode: "indexed", "skip": how a position is found again.
      description: one line for people.
      counted: every example is in the totals of the loop; not where workers may be lost.
    """

    iterator: Any
    steps: int | None
    ends_unknown: bool
    steps_per_epoch: float | None
    mode: str
    description: str
    examples: int | None = None
    counted: bool = True


def open_train(
    make: Callable[[int], Any], strategy: tf.distribute.Strategy, *, global_batch_size: int,
    seed: int, start_examples: int = 0, epochs: float | None = None,
) -> Batches:  # fmt: skip
    """Opens `train_data` at `start_examples` consumed examples.

    Seeds TensorFlow first, so an unseeded shuffle is the same on every worker and after a resume.
    Raises UsageError for anything that is not batches of `global_batch_size`.
    """
    place = placement(strategy)
    _check_batch_size(global_batch_size, place)
    tf.random.set_seed(seed)
    source = as_source(make(global_batch_size), "train_data", global_batch_size, shuffle=True)
    if isinstance(source, ArrayData):
        return _open_arrays(source, strategy, place, seed, start_examples, epochs)
    check_dataset(source, "train_data", global_batch_size)
    count = cardinality(source)
    steps: int | None
    if epochs is not None:
        if count is None:
            raise UsageError(
                "epochs were asked for, but the length of train_data is endless or unknown. Give "
                "steps (--train_steps) instead, or return a finite dataset without repeat()."
            )
        steps = math.ceil(epochs * count)
        source = source.repeat(math.ceil(epochs))
    else:
        steps = count
    endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    skipped = start_examples // global_batch_size
    dataset = rows_checked(source, global_batch_size)
    dataset = dataset.skip(skipped) if skipped else dataset
    if steps is not None:
        steps = max(0, steps - skipped)
    return Batches(
        iterator=_iterator(dataset, strategy, place),
        steps=None if _sharded_by_tensorflow(source, place) else steps,
        ends_unknown=(not endless and steps is None)
        or (_sharded_by_tensorflow(source, place) and not endless),
        steps_per_epoch=count,
        mode="skip",
        description=describe(source, count, global_batch_size),
    )


def open_eval(
    make: Callable[[int], Any], strategy: tf.distribute.Strategy, *, global_batch_size: int
) -> Batches:
    """Opens `eval_data` for one pass; every example comes once, whatever the batch or the workers.

    Nothing is seeded here: that would throw away TensorFlow's compiled kernels, training's too.
    """
    place = placement(strategy)
    source = as_source(make(global_batch_size), "eval_data", global_batch_size, shuffle=False)
    if isinstance(source, ArrayData):
        return _open_arrays(source.in_order(), strategy, place, 0, 0, 1)
    check_dataset(source, "eval_data", None)
    if source.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise UsageError(
            "eval_data is endless; expected one pass over the examples. Remove repeat(), or write "
            "eval_data(...).take(n)."
        )
    count = None if _sharded_by_tensorflow(source, place) else cardinality(source)
    return Batches(
        iterator=_iterator(source, strategy, place), steps=count, ends_unknown=count is None,
        steps_per_epoch=count, mode="skip", description=describe(source, count, global_batch_size),
    )  # fmt: skip


def _open_arrays(data: ArrayData, strategy, place: Placement, seed, start, epochs) -> Batches:
    total = None if epochs is None else math.ceil(epochs * data.num_examples)

    def replica_batches(first_replica: int, count: int):
        return data.replica_batches(
            seed=seed, start=start, total=total,
            replicas=range(first_replica, first_replica + count), num_replicas=place.num_replicas,
        )  # fmt: skip

    order = "shuffled" if data.shuffle else "in order"
    return Batches(
        iterator=_from_replica_batches(replica_batches, strategy, place),
        steps=None if total is None else max(0, math.ceil((total - start) / data.batch_size)),
        ends_unknown=False,
        steps_per_epoch=data.num_examples / data.batch_size,
        mode="indexed",
        description=f"{data.num_examples:,} examples in memory, {order}",
        examples=total,
    )


def _iterator(dataset, strategy, place: Placement):
    if _sharded_by_tensorflow(dataset, place):
        return iter(strategy.experimental_distribute_dataset(dataset))

    def replica_batches(first_replica: int, count: int):
        if place.num_replicas == 1:
            return dataset
        replicas = range(first_replica, first_replica + count)
        if count == 1:
            return dataset.map(lambda *b: _rows(_one(b), first_replica, place.num_replicas))

        def split(*batch):
            parts = [_rows(_one(batch), r, place.num_replicas) for r in replicas]
            pieces = [tf.data.Dataset.from_tensors(p) for p in parts]
            return functools.reduce(lambda a, b: a.concatenate(b), pieces)

        return dataset.flat_map(split)

    return _from_replica_batches(replica_batches, strategy, place)


def _from_replica_batches(replica_batches, strategy, place: Placement):
    """The cheapest iterator that feeds `strategy.run`: a plain one where each worker has one CPU."""
    if place.num_local_replicas == 1 and _on_cpu(strategy):
        return iter(prefetched(replica_batches(place.worker_index, 1)))

    def for_worker(context):
        n = place.num_local_replicas
        return prefetched(replica_batches(context.input_pipeline_id * n, n))

    return iter(strategy.distribute_datasets_from_function(for_worker))


def _on_cpu(strategy) -> bool:
    """Whether batches are needed in host memory; the default strategy copies by itself."""
    if word_of(strategy) == "default":
        return True
    return "CPU" in strategy.extended.worker_devices[0].upper()


def prefetched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    already = "Prefetch" in type(dataset).__name__
    return dataset if already else dataset.prefetch(tf.data.AUTOTUNE)


def _one(batch: tuple):
    """`Dataset.map` spreads tuples over arguments; this undoes it."""
    return batch[0] if len(batch) == 1 else batch


def num_rows(batch):
    """Examples in a batch: an int where static, else a scalar tensor (None for a mere spec)."""
    first = tf.nest.flatten(batch)[0]
    static = first.shape[0] if first.shape.rank else None
    if static is not None or isinstance(first, tf.TypeSpec):
        return static
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first)[0]


def take_rows(batch, low, high):
    """Rows `low` to `high` (exclusive) of every component of a batch; dense, ragged or sparse."""

    def take(component):
        if isinstance(component, tf.SparseTensor):
            start = tf.concat([[tf.cast(low, tf.int64)], component.dense_shape[1:] * 0], 0)
            size = tf.concat([[tf.cast(high - low, tf.int64)], component.dense_shape[1:]], 0)
            return tf.sparse.slice(component, start, size)
        return component[low:high]

    return tf.nest.map_structure(take, batch)


def _rows(batch, replica: int, num_replicas: int):
    n = num_rows(batch)
    return take_rows(batch, n * replica // num_replicas, n * (replica + 1) // num_replicas)


def as_source(source, name: str, batch_size: int, shuffle: bool):
    if isinstance(source, (tf.data.Dataset, ArrayData)):
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


def rows_checked(dataset: tf.data.Dataset, global_batch_size: int) -> tf.data.Dataset:
    """Where the batch size is only known when batches come, one that is too large is an error."""
    if isinstance(num_rows(dataset.element_spec), int):
        return dataset

    def check(*batch):
        rows = num_rows(_one(batch))
        message = f"{TOO_MANY_ROWS} {global_batch_size}"
        with tf.control_dependencies([tf.debugging.assert_less_equal(
            tf.cast(rows, tf.int64), tf.constant(global_batch_size, tf.int64), message)]):  # fmt: skip
            return tf.nest.map_structure(tf.identity, _one(batch), expand_composites=True)

    options = dataset.options()
    return dataset.map(check).with_options(options)


def _check_batch_size(global_batch_size: int, place: Placement) -> None:
    r = place.num_replicas
    if global_batch_size % r:
        low = max(r, global_batch_size // r * r)
        raise UsageError(
            f"global_batch_size is {global_batch_size}, which {r} replicas cannot split evenly. "
            f"Write a multiple of {r}, e.g. {low} or {low + r}."
        )


def check_dataset(dataset: tf.data.Dataset, name: str, global_batch_size: int | None) -> None:
    if dataset.cardinality() == 0:
        raise UsageError(
            f"{name} is empty; expected at least one batch. Fewer examples than a batch with "
            "drop_remainder=True also give none."
        )
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is None or shape.rank is None:
            continue
        if shape.rank == 0:
            raise UsageError(
                f"{name} is not batched: one of its components is a scalar "
                f"({tuple_of(dataset.element_spec)}). Write dataset.batch(batch_size)."
            )
        if global_batch_size and shape[0] not in (None, global_batch_size):
            raise UsageError(
                f"{name} yields {shape[0]} rows at a time; expected global batches of "
                f"{global_batch_size}. Write dataset.batch(batch_size) with the batch_size that "
                f"{name} is given, or set --global_batch_size={shape[0]}."
            )


def tuple_of(spec) -> str:
    """Shapes of an element for a message, e.g. "(28, 28), ()"."""
    return ", ".join(str(getattr(s, "shape", s)) for s in tf.nest.flatten(spec))


def cardinality(dataset: tf.data.Dataset) -> int | None:
    n = int(dataset.cardinality())
    return n if n >= 0 else None


def _sharded_by_tensorflow(dataset, place: Placement) -> bool:
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return place.num_workers > 1 and policy in (_POLICIES["file"], _POLICIES["off"])


def describe(dataset, count: int | None, batch_size: int) -> str:
    if count is not None:
        return f"{count:,} batches of {batch_size}"
    endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    return f"{'endless' if endless else 'unknown number of'} batches of {batch_size}"
