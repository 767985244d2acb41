"""Open sources of replica batches, and the iterators that feed `strategy.run`.

Iterators are destroyed in the background, see iterator_release.py.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.data import iterator_release
from ctl.data.row_windows import RowWindows
from ctl.distribute.row_partition import Share, share
from ctl.distribute.strategy_kind import StrategyKind, kind_of
from ctl.distribute.topology import Topology


@dataclass(frozen=True)
class Passes:
    """The pending passes over data of unknown length, while the first pass is open.

    Attributes:
      open_next: Function (number of steps of the open pass, at its end) -> the batches that follow. After
        the last pass it returns the same batches with their length.
      remaining_steps: Number of steps until the end of the last pass, if an earlier run has counted the
        batches of a pass. None: unknown.
      is_last: True if no pass follows.
    """

    open_next: Callable[[int], "Batches"]
    remaining_steps: int | None
    is_last: bool


@dataclass(frozen=True)
class Batches:
    """An open source of replica batches.

    Attributes:
      iterator: Iterator for the graph loop. Its type is the same each time a source is opened.
      steps: Number of global batches from the current position to the end. None: endless or unknown.
      has_unknown_end: True if the data end after an unknown number of steps, so that the loop checks before
        every step.
      steps_per_epoch: Number of steps, possibly fractional. Infinity until it has been counted. None: the
        data have no epochs.
      mode: Way to reach a position: "indexed", "skip" or "iterator", see resume_position.py.
      description: One line for logs.
      examples: Number of examples from the start of the data to the end, if batches may be short.
      is_in_memory: True if each batch is gathered from arrays in memory.
      has_exact_counts: True if the totals of the loop include every example. False if workers may be lost.
      is_per_worker: True if each worker reads separate data, so that a position holds for one number of
        workers only.
      share_of: Function (element, in replica context) -> the share of the replica. Elements are rows, or
        pairs (rows, number of real rows) if a share may be empty. With a saved iterator they are global
        batches, because such an iterator must not depend on the number of replicas.
      has_even_shares: True if the shares of all replicas have the same static shape.
      passes: Passes that follow if the data have an unknown length. None: no pass follows.
      iterator_state: Function (number of consumed examples) -> JSON object to save, with which the source
        continues there, or None.
      windows: Row numbers for a compiled loop that gathers rows itself; `iterator` yields row numbers.
      order_seed: Seed of the order of shuffled examples that are read by index, or None.
      saves_own_position: True if the data are a Grain pipeline, which saves the state of its iterator.
    """

    iterator: Any
    steps: int | None
    has_unknown_end: bool
    steps_per_epoch: float | None
    mode: str
    description: str
    examples: int | None = None
    is_in_memory: bool = False
    has_exact_counts: bool = True
    is_per_worker: bool = False
    share_of: Callable[[Any], Share] = Share
    has_even_shares: bool = False
    passes: Passes | None = None
    iterator_state: Callable[[int], Mapping[str, Any] | None] = lambda examples: None
    windows: RowWindows | None = None
    order_seed: int | None = None
    saves_own_position: bool = False

    def __post_init__(self) -> None:
        release = iterator_release.iterators  # of this process, in which the owner is collected
        weakref.finalize(self, release.release, release.register(self.iterator)).atexit = False


def counted_share(element: tuple[Any, Any]) -> Share:
    """Returns the share in an element (rows, number of real rows)."""
    return Share(*element)


@dataclass(frozen=True)
class ShareExtractor:
    """A function (global batch, in replica context) -> share of the replica.

    Attributes:
      first: First replica of this process.
      num_local: Number of replicas of this process.
      num_replicas: Number of replicas of all processes.
      is_counted: True if a share may be empty, so that the result includes the number of real rows.
    """

    first: int
    num_local: int
    num_replicas: int
    is_counted: bool

    def __call__(self, batch: Any) -> Share:
        """Returns the part of a batch for the replica that calls it."""
        replica = 0
        if self.num_local > 1:
            context = tf.distribute.get_replica_context()
            replica = int(tf.get_static_value(context.replica_id_in_sync_group)) % self.num_local
        return share(batch, self.first + replica, self.num_replicas, counted=self.is_counted)


def from_replica_batches(replica_batches: Callable, strategy: Any, topology: Topology) -> Any:
    """Returns an iterator for `strategy.run`.

    It is an iterator of the dataset if each worker has one replica on a CPU, because a distributed iterator
    is slower.

    Args:
      replica_batches: Function (first replica, number of replicas) -> dataset of their batches in turn.
      strategy: Strategy of the job.
      topology: Topology of the job.
    """
    if topology.num_local_replicas == 1 and is_on_cpu(strategy):
        return iter(prefetched(replica_batches(topology.worker_index, 1)))

    def for_worker(context: Any) -> Any:
        n = topology.num_local_replicas
        return prefetched(replica_batches(context.input_pipeline_id * n, n))

    return iter(strategy.distribute_datasets_from_function(for_worker))


def device_of(strategy: Any) -> str | None:
    """Returns the device of the only replica. None: TensorFlow chooses it."""
    is_default = kind_of(strategy) is StrategyKind.DEFAULT
    return None if is_default else strategy.extended.worker_devices[0]


def is_on_cpu(strategy: Any) -> bool:
    """Returns True if batches are used in host memory, or if TensorFlow copies them to the device."""
    if kind_of(strategy) is StrategyKind.DEFAULT:
        return True
    return "CPU" in strategy.extended.worker_devices[0].upper()


def prefetched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset with a prefetch at its end."""
    is_prefetched = "Prefetch" in type(dataset).__name__
    return dataset if is_prefetched else dataset.prefetch(tf.data.AUTOTUNE)
