"""An open source of replica batches, and the cheapest iterator that feeds `strategy.run`.

Iterators are destroyed in the background, see iterator_release.py.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.data import iterator_release
from ctl.data.row_windows import RowWindows
from ctl.distribute.row_partition import Share, share
from ctl.distribute.strategies import word_of
from ctl.distribute.topology import Topology


@dataclass(frozen=True)
class Passes:
    """Of data whose length is not known before their first pass has ended.

    Attributes:
      ended: (steps of the pass that is open, when it has ended) -> the batches that follow it, or of the
        last pass the same batches; their length is known.
      steps: from here to the end of the last pass, if an earlier run has found out; None: unknown.
      last: nothing follows.
    """

    ended: Callable[[int], "Batches"]
    steps: int | None
    last: bool


@dataclass(frozen=True)
class Batches:
    """An open source of replica batches.

    Attributes:
      iterator: what the graph loop takes; its type is the same for every opening of one source.
      steps: global batches from here to the end of the data; None: endless or unknown.
      examples: from the start of the data to its end, where that is not a matter of whole batches.
      ends_unknown: the data ends, nobody knows when: the loop asks before every step.
      steps_per_epoch: None if there is none, infinite before it is known; not always whole.
      windows: the data are indexed within a compiled loop; `iterator` gives rows, see row_windows.py.
      passes: the first pass over data of unknown length is open; None: what is open is all there is.
      mode: "indexed", "skip", "iterator": how a position is found again, see resume_position.py.
      description: one line for people.
      certain: every example is in the totals of the loop; not where workers may be lost.
      per_worker: each worker reads data of its own, so a position holds for one number of workers.
      share_of: (an element, in replica context) -> the replica's Share. Elements are rows, or rows with
        the number of real ones, as a share may be without any; or they are global batches, as a saved
        iterator does not depend on the number of replicas.
      even: the shares of all replicas have the same static shape, where it is static.
    """

    iterator: Any
    steps: int | None
    ends_unknown: bool
    steps_per_epoch: float | None
    mode: str
    description: str
    examples: int | None = None
    certain: bool = True
    per_worker: bool = False
    share_of: Callable[[Any], Share] = Share
    even: bool = False
    passes: Passes | None = None
    windows: RowWindows | None = None

    def __post_init__(self) -> None:
        release = iterator_release.iterators  # of this process, in which the owner is collected
        weakref.finalize(self, release.release, release.register(self.iterator)).atexit = False


def counted(element: tuple[Any, Any]) -> Share:
    """The share in an element that comes with the number of its real rows."""
    return Share(*element)


@dataclass(frozen=True)
class Cut:
    """(A global batch, in replica context) -> the replica's share of it.

    Attributes:
      first: this process's first replica, of `num_local` here and `num_replicas` in all.
      counted: a share may be without rows, so their number comes with it.
    """

    first: int
    num_local: int
    num_replicas: int
    counted: bool

    def __call__(self, batch: Any) -> Share:
        replica = 0
        if self.num_local > 1:
            context = tf.distribute.get_replica_context()
            replica = int(tf.get_static_value(context.replica_id_in_sync_group)) % self.num_local
        return share(batch, self.first + replica, self.num_replicas, counted=self.counted)


def from_replica_batches(replica_batches: Any, strategy: Any, topology: Topology) -> Any:
    """The cheapest iterator that feeds `strategy.run`: a plain one where each worker has one CPU."""
    if topology.num_local_replicas == 1 and on_cpu(strategy):
        return iter(prefetched(replica_batches(topology.worker_index, 1)))

    def for_worker(context: Any) -> Any:
        n = topology.num_local_replicas
        return prefetched(replica_batches(context.input_pipeline_id * n, n))

    return iter(strategy.distribute_datasets_from_function(for_worker))


def device_of(strategy: Any) -> str | None:
    """Where the only replica computes; None: TensorFlow's choice."""
    return None if word_of(strategy) == "default" else strategy.extended.worker_devices[0]


def on_cpu(strategy: Any) -> bool:
    """Whether batches are needed in host memory; the default strategy copies by itself."""
    if word_of(strategy) == "default":
        return True
    return "CPU" in strategy.extended.worker_devices[0].upper()


def prefetched(dataset: tf.data.Dataset) -> tf.data.Dataset:
    already = "Prefetch" in type(dataset).__name__
    return dataset if already else dataset.prefetch(tf.data.AUTOTUNE)
