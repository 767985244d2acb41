"""Conversion of a `tf.data.Dataset` of global batches to replica batches, with an exact position.

Every worker builds the same pipeline of global batches and keeps its rows of each batch, see
`ctl/distribute/row_partition.py`. All workers therefore read the same number of batches without agreement
in each step, a short batch is spread evenly, and the global batches equal those of one device. With
`shard(dataset, "file")` or "off", TensorFlow's auto-sharding distributes the dataset instead.

The position is the number of consumed examples. `indexed.IndexedData` starts there at once. Any other
dataset is rebuilt from its seed, and its first batches are skipped. For batches that Python code reads,
python_batches.py defines the position.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from ctl.data import dataset_checks, input_errors, passes, resume_position, row_windows, sharding, sources
from ctl.data.arrays import ExampleNumbers
from ctl.data.batches import (
    Batches,
    ShareExtractor,
    counted_share,
    device_of,
    from_replica_batches,
    prefetched,
)
from ctl.data.indexed import IndexedData
from ctl.data.python_batches import PythonBatches
from ctl.data.row_checks import joined, rows_checked
from ctl.distribute.row_partition import Share, may_be_empty, num_rows, share, with_unknown_rows
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.tensorflow_patches import kernel_seeds


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
    iterator_state: Mapping[str, Any] | None = None,
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
      mode: Way to reach the position, a value of `Config.data_position`.
      position: Saved iterator to continue with. None: start from `start_examples`.
      resumable: True if the run has checkpoints.
      batches_per_pass: Number of batches that an earlier run has counted in data of unknown length, or
        `passes.COUNT_AGAIN`. None: unknown.
      rows_may_vary: True to allow batches of any size on one replica.
      indexed: True if a compiled loop gathers the rows of arrays itself.
      iterator_state: A value of `Batches.iterator_state` at this position, or None.

    Raises:
      UsageError: The data are not batches of `global_batch_size`, or do not fit the other arguments.
    """
    is_resumed = start_examples > 0  # possibly with another number of replicas
    dataset_checks.check_batch_size(
        global_batch_size, topology, is_divisible=not (is_resumed or topology.is_elastic)
    )
    kernel_seeds.set_seed(seed)
    with input_errors.explain_missing_files("train_data"):
        source = sources.as_source(
            train_data(global_batch_size),
            "train_data",
            global_batch_size,
            shuffle=True,
            seed=seed,
            make_again=lambda: train_data(global_batch_size),
        )
    python = source if isinstance(source, PythonBatches) else None
    source = source if python is None else python.dataset
    _check_sharing(source, global_batch_size, topology, mode, "" if python is None else python.mode)
    if isinstance(source, IndexedData):
        return _open_indexed(source, strategy, topology, seed, start_examples, epochs, indexed)
    if indexed:
        batches = "a tf.data.Dataset" if python is None else "batches of Python code"
        name = "only numbers" if isinstance(source, ExampleNumbers) else batches
        row_windows.raise_not_in_memory(name)
    if isinstance(source, ExampleNumbers):
        return _open_numbers(source, strategy, topology, start_examples)
    rows_may_vary &= topology.num_replicas == 1
    expected_rows = None if rows_may_vary else global_batch_size
    dataset_checks.check_dataset(source, "train_data", expected_rows, topology)
    saves_own_state = python is not None and python.mode == "iterator"
    position = None if saves_own_state else position
    source = resume_position.checked_dataset(
        source,
        has_iterator=position is not None,
        is_chief=topology.is_chief,
        resumable=resumable,
        mode="auto" if saves_own_state else mode,
        starts_anywhere=python is not None and python.mode != "skip",
    )
    job = _Job(strategy, topology, global_batch_size, rows_may_vary, python, iterator_state, mode)
    return _open_dataset(source, job, start_examples, epochs, position, batches_per_pass)


@dataclasses.dataclass(frozen=True)
class _Job:
    """Arguments that all parts of a dataset have in common.

    Attributes:
      strategy, topology, global_batch_size, rows_may_vary, mode: See `open_train_data`.
      python: Source of the dataset if Python code reads the batches, or None.
      iterator_state: Saved state for `python`, or None.
    """

    strategy: Any
    topology: Topology
    global_batch_size: int
    rows_may_vary: bool
    python: PythonBatches | None
    iterator_state: Mapping[str, Any] | None
    mode: str

    def start_python(self, before: int, skipped: int) -> bool:
        """Calls `PythonBatches.start_at`. Returns False without Python code or with mode "skip"."""
        if self.python is None or self.mode == "skip":
            return False
        saved = self.iterator_state or {}
        is_same = saved.get("batches") == before + skipped
        return self.python.start_at(before, skipped, saved.get("state") if is_same else None)

    def save_python(self, examples: int) -> Mapping[str, Any] | None:
        """Returns the value to save after `examples` consumed examples, or None."""
        batches = examples // self.global_batch_size
        state = None if self.python is None else self.python.state_at(batches)
        return None if state is None else {"batches": batches, "state": state}


def _open_dataset(
    source: tf.data.Dataset,
    job: _Job,
    start_examples: int,
    epochs: float | None,
    position: resume_position.SavedIterator | None,
    batches_per_pass: int | None,
) -> Batches:
    count = dataset_checks.cardinality(source) if job.python is None else job.python.num_batches
    is_endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    if epochs is not None and is_endless:
        raise UsageError(
            f"epochs is {epochs}, but train_data is endless. Give steps (--train_steps) instead, or "
            "return a finite dataset without repeat()."
        )
    skipped = start_examples // job.global_batch_size
    if count is None and not is_endless:
        number = passes.num_passes(epochs)
        if position is None:
            return passes.open_passes(
                source,
                lambda part, before, skip: _open_part(part, job, before, skip, None, None),
                number=number,
                skipped=skipped,
                batches_per_pass=batches_per_pass,
                must_count=job.iterator_state is None,
            )
        source = source.repeat(number)
    steps, description = count, dataset_checks.describe_dataset(source, count, job.global_batch_size)
    if epochs is not None and count is not None:
        steps = math.ceil(epochs * count)
        # a saved iterator contains the number of repetitions, so a longer run must use the same number
        source = source.repeat(math.ceil(epochs) if position is None else resume_position.MOST_PASSES)
    batches = _open_part(source, job, 0, skipped, steps, position)
    return dataclasses.replace(batches, steps_per_epoch=count, description=description)


def _open_part(
    source: tf.data.Dataset,
    job: _Job,
    before: int,
    skipped: int,
    steps: int | None,
    position: resume_position.SavedIterator | None,
) -> Batches:
    """Opens a dataset that ends after `steps` steps from its start. None: endless, or of unknown length.

    Before its start are `before` batches of earlier passes.
    """
    topology, strategy = job.topology, job.strategy
    is_endless = source.cardinality() == tf.data.INFINITE_CARDINALITY
    max_rows = None if job.rows_may_vary else job.global_batch_size
    dataset = rows_checked(source, max_rows, num_replicas=topology.num_replicas)
    is_sharded_by_tensorflow = sharding.is_by_tensorflow(source, topology)
    if steps is not None:
        steps = max(0, steps - skipped)
    if position is None:
        starts_itself = job.start_python(before, skipped)
        iterator = _iterator(dataset, strategy, topology, 0 if starts_itself else skipped)
    else:
        if not position.variable.numpy():
            dataset = dataset.skip(skipped)
        iterator = iter(prefetched(dataset))
        position.attach(iterator)
    mode = "skip" if job.python is None or job.mode == "skip" else job.python.mode
    return Batches(
        iterator=iterator,
        steps=None if is_sharded_by_tensorflow else steps,
        has_unknown_end=not is_endless and (steps is None or is_sharded_by_tensorflow),
        steps_per_epoch=None,
        mode=mode if position is None else "iterator",
        description=dataset_checks.describe_dataset(
            source, dataset_checks.cardinality(source), job.global_batch_size
        ),
        share_of=_share_of(source, topology) if position is None else _share_extractor(source, topology),
        has_even_shares=_has_even_shares(source, topology),
        is_per_worker=sharding.is_per_worker(source),
        iterator_state=job.save_python,
        saves_own_position=job.python is not None and job.python.mode == "iterator",
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
        source = sources.as_dataset(eval_data(global_batch_size), name, global_batch_size, shuffle=False)
    if isinstance(source, IndexedData):
        return _open_indexed(source.in_order(), strategy, topology, 0, 0, 1, False)
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


def _open_indexed(
    data: IndexedData, strategy: Any, topology: Topology, seed: Any, start: Any, epochs: Any, indexed: bool
) -> Batches:
    total = None if epochs is None else data.num_examples_in(epochs)
    data = data.with_varying_shares() if topology.is_elastic else data
    windows = None
    if indexed:
        if data.rows.tensors() is None:
            row_windows.raise_not_in_memory("ragged or sparse arrays" if data.is_in_memory else "a source")
        windows = data.windows(seed=seed, start=start, total=total, device=device_of(strategy))

    def replica_batches(first_replica: int, count: int) -> Any:
        return data.replica_batches(
            seed=seed,
            start=start,
            total=total,
            replicas=range(first_replica, first_replica + count),
            num_replicas=topology.num_replicas,
        )

    return Batches(
        iterator=windows.iterator if windows else from_replica_batches(replica_batches, strategy, topology),
        steps=None if total is None else max(0, math.ceil((total - start) / data.batch_size)),
        has_unknown_end=False,
        steps_per_epoch=data.steps_per_epoch,
        mode="indexed",
        description=data.describe(),
        examples=total,
        is_in_memory=data.is_in_memory,
        share_of=counted_share if data.has_counted_shares(start, total, topology.num_replicas) else Share,
        has_even_shares=data.batch_size % topology.num_replicas == 0 and not topology.is_elastic,
        windows=windows,
        order_seed=data.order_seed(seed),
    )


def _check_sharing(
    source: Any, global_batch_size: int, topology: Topology, mode: str, own_mode: str
) -> None:
    """Raises UsageError if the replicas cannot share the source, or the position cannot be saved."""
    is_indexed = isinstance(source, (IndexedData, ExampleNumbers))
    is_per_worker = not is_indexed and sharding.is_by_tensorflow(source, topology)
    is_divisible = is_per_worker or isinstance(source, ExampleNumbers)
    dataset_checks.check_batch_size(global_batch_size, topology, is_divisible)
    resume_position.check_mode(mode, is_indexed=is_indexed, is_per_worker=is_per_worker, own_mode=own_mode)


def _iterator(dataset: Any, strategy: Any, topology: Topology, skipped: int = 0) -> Any:
    """Returns an iterator for `strategy.run` over global batches, without the first `skipped` steps."""
    if sharding.is_by_tensorflow(dataset, topology):
        return sharding.distributed_iterator(dataset, strategy, skipped * topology.num_local_replicas)
    if skipped:
        dataset = dataset.skip(skipped)
    is_counted = _has_counted_shares(dataset, topology)

    def element(batch: tuple, replica: int) -> Any:
        part = share(joined(batch), replica, topology.num_replicas, counted=is_counted)
        if topology.is_elastic:
            part = part._replace(rows=with_unknown_rows(part.rows))
        return tuple(part) if is_counted else part.rows

    def replica_batches(first_replica: int, count: int) -> Any:
        if topology.max_replicas == 1:
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


def _has_counted_shares(dataset: Any, topology: Topology) -> bool:
    """Returns True if a share may be empty, so that elements include the number of real rows."""
    rows = num_rows(dataset.element_spec)
    may_lack_rows = topology.is_elastic or may_be_empty(rows, topology.num_replicas)
    return not sharding.is_by_tensorflow(dataset, topology) and may_lack_rows


def _has_even_shares(dataset: Any, topology: Topology) -> bool:
    rows = num_rows(dataset.element_spec)
    if rows is None or rows % topology.num_replicas or topology.is_elastic:
        return False
    return not sharding.is_by_tensorflow(dataset, topology)
