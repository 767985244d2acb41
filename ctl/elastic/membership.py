"""Membership of this worker in the groups of an elastic job, and the strategy over them.

    strategy = create_strategy(config, flags)     # blocks until the first group is complete
    group = group_of(strategy)
    group.join()                                  # leaves the group and joins the next one

The launcher assigns ranks and addresses (`ctl.launch.membership`). A replica keeps its number, which the
launcher assigns to its worker at the start, in all groups, so traced functions stay valid.
"""

import atexit
import dataclasses
import importlib
import json
import os
import threading
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.collectives import graph_errors
from ctl.collectives.calls import Members
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.failures import create_exception
from ctl.collectives.ranks import Ranks
from ctl.collectives.settings import read_settings
from ctl.config import Config
from ctl.distribute import engine_all_reduce, job_fingerprint, strategies
from ctl.distribute.engine_all_reduce import PeerLimits
from ctl.distribute.topology import Topology
from ctl.elastic import requirements
from ctl.errors import UsageError
from ctl.hvd import elastic_line
from ctl.setting_values import WorkerRange
from ctl.supervision import heartbeat
from ctl.tensorflow_patches import elastic_strategy

NEWCOMER_VARIABLE = "CTL_ELASTIC_NEWCOMER"  # "1" in a worker that is started after the first group
SLOT_VARIABLE = "CTL_ELASTIC_SLOT"
_START_SECS = 60.0
_SILENCE_SECS = 100.0  # if `heartbeat_secs` is 0
_DETECTION = 0.8  # part of the silence after which it counts: it is checked four times within this time
_groups: weakref.WeakKeyDictionary[Any, "WorkerGroup"] = weakref.WeakKeyDictionary()  # by strategy


class WorkerGroup:
    """The current group of this worker, as a `calls.CollectiveGroup`.

    Args:
      limits: Smallest and largest number of workers.
      slot: Number of this worker's replica: at most one living worker has it, and it is below the maximum.
      peer_limits: Timeouts of the engine.

    Attributes:
      limits, slot: See the arguments.
      replica_count: Number of workers as a `tf.Variable`, for use in graphs.
      has_joined: True after the first `join`.
    """

    def __init__(self, limits: WorkerRange, slot: int, peer_limits: PeerLimits):
        self.limits, self.slot = limits, slot
        silence_secs = _DETECTION * (peer_limits.heartbeat_secs or _SILENCE_SECS)
        self._settings = dataclasses.replace(
            read_settings(),
            start_timeout=_START_SECS,
            stall_warning=0.0,
            stall_shutdown=peer_limits.timeout_secs,
            stall_name="--collective_timeout_secs",
            heartbeat_timeout=silence_secs,
        )
        self.engine = Engine(Ranks(), self._settings)
        self.has_joined = False
        self._will_change = False
        with tf.device("/device:CPU:0"):
            self.replica_count = tf.Variable(1.0, dtype=tf.float64, trainable=False, name="replica_count")
        elastic_line.add_listener(self)
        elastic_line.limit_silence(silence_secs)

    @property
    def ranks(self) -> Ranks:
        """Ranks of the current group. Before the first `join`, a group of this worker."""
        return self.engine.ranks

    @property
    def will_change(self) -> bool:
        """True if a worker waits to join, or the launcher removes one."""
        return self._will_change

    def members(self) -> Members:
        """Returns all ranks of the current group."""
        return Members(self.engine, 0, range(self.engine.ranks.size))

    def check_registered(self) -> None:
        """Does not raise an error: the group always has members."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Records that the launcher will change the group. Called in another thread."""
        self._will_change = True

    def join(self) -> None:
        """Leaves the current group and joins the next one. Blocks until it is complete.

        Raises:
          PeerLostError: If the launcher cannot form a group in time.
        """
        while True:
            self._leave()
            with heartbeat.current.enter_phase(heartbeat.CONNECTING):
                engine = elastic_line.connect_group(self._connect)
            elastic_line.set_loss_listener(engine.fail_all)
            self.engine, self.has_joined, self._will_change = engine, True, False
            atexit.register(engine.close)
            try:
                engine.agree_on_links()
            except HorovodInternalError:  # a member of the new group has failed
                continue
            self.replica_count.assign(float(engine.ranks.size))
            return

    def exchange(self, row: Sequence[float]) -> np.ndarray:
        """Returns the rows of all workers by rank, `[size, n]` float64. Collective."""
        rows = np.zeros([self.ranks.size, len(row)])
        rows[self.ranks.rank] = row
        return self.engine.sum("ctl.elastic.rows", rows.ravel()).reshape(rows.shape)

    def broadcast(self, name: str, array: np.ndarray, root: int) -> np.ndarray:
        """Returns the array of rank `root`, of equal shape and dtype on all ranks. Collective."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not data.size:
            return array
        pending = self.engine.submit("broadcast", f"ctl.elastic.{name}", [data], root=root, is_eager=False)
        (result,) = self.engine.wait(pending)
        return np.asarray(result).view(array.dtype).reshape(array.shape)

    def _connect(self, ranks: Ranks) -> Engine:
        return Engine(ranks, self._settings, elastic_line.read_loss, create_error=create_exception)

    def _leave(self) -> None:
        atexit.unregister(self.engine.close)
        self.engine.close()


class ElasticTopology(Topology):
    """Topology of the current group of an elastic job. Each worker has one replica.

    Attributes:
      group: The group.
    """

    group: WorkerGroup

    def __init__(self, group: WorkerGroup):
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "settings", {})

    @property
    def tasks(self) -> Mapping[str, tuple[str, ...]]:
        """Addresses of the workers by rank."""
        return {"worker": self.group.ranks.addresses}

    @property
    def task_index(self) -> int:
        """Rank of this worker."""
        return self.group.ranks.rank

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the current group."""
        return self.group.ranks.size

    @property
    def is_chief(self) -> bool:
        """True for rank 0, except in a worker that has not joined a group."""
        return self.group.ranks.rank == 0 and self.group.has_joined

    @property
    def is_elastic(self) -> bool:
        """True."""
        return True

    @property
    def max_replicas(self) -> int:
        """Largest number of workers, at least 2."""
        return max(2, self.group.limits.maximum)

    @property
    def min_replicas(self) -> int:
        """Smallest number of workers."""
        return self.group.limits.minimum

    @property
    def replica_count(self) -> tf.Variable:
        """Number of workers when a graph runs."""
        return self.group.replica_count

    @property
    def first_replica(self) -> int:
        """Number of the replica of this worker, which is that of its slot."""
        return self.group.slot


def create_strategy(config: Config, flags: Mapping[str, Any]) -> tf.distribute.Strategy:
    """Returns the strategy of an elastic job. Blocks until the first group is complete.

    A worker that is started later does not join a group yet.

    Args:
      config: Settings of the trainer.
      flags: Values that must be equal on all workers.

    Raises:
      UsageError: For unsupported settings, or if the workers were started with different flags.
      PeerLostError: If the launcher cannot form a group in time.
    """
    limits = requirements.check_settings(config)
    slot = int(os.environ.get(SLOT_VARIABLE, "0"))
    group = WorkerGroup(limits, slot, PeerLimits(config.heartbeat_secs, config.collective_timeout_secs))
    graph_errors.install_graph_errors()
    topology = ElasticTopology(group)
    threading.Thread(target=_import_writers, name="ctl-writers", daemon=True).start()
    if os.environ.get(NEWCOMER_VARIABLE) != "1":
        group.join()
        _check_equal_flags(group, flags)
    strategy = elastic_strategy.create_elastic_strategy(
        topology.max_replicas, slot, lambda: group.ranks.size, group.replica_count
    )
    _groups[strategy] = group
    use_group(strategy)
    return strategies.with_topology(strategy, topology)


def checked_strategy(strategy: tf.distribute.Strategy, config: Config) -> tf.distribute.Strategy:
    """Returns a strategy object. Raises UsageError for others, and in an elastic job for the user's."""
    if not isinstance(strategy, tf.distribute.Strategy):
        names = ", ".join(strategies.STRATEGY_NAMES)
        raise UsageError(
            f"strategy is {strategy!r:.80}; expected a tf.distribute.Strategy, or one of {names}."
        )
    if requirements.is_requested(config) and group_of(strategy) is None:
        requirements.check_settings(config)
    return strategy


def use_group(strategy: tf.distribute.Strategy) -> None:
    """Runs the collectives of a strategy of `create_strategy` on its current group."""
    group = _groups[strategy]
    engine_all_reduce.install_engine(strategy, group.engine, group)


def group_of(strategy: tf.distribute.Strategy) -> WorkerGroup | None:
    """Returns the group of a strategy of `create_strategy`, or None for another strategy."""
    return _groups.get(strategy)


def _import_writers() -> None:
    """Imports the modules of the default writers, which a worker needs when it becomes the chief."""
    for name in ("console", "jsonl", "tensorboard"):
        importlib.import_module(f"ctl.metrics.{name}")


def _check_equal_flags(group: WorkerGroup, flags: Mapping[str, Any]) -> None:
    facts = job_fingerprint.fingerprint_of_process(0, flags)
    checksum = zlib.crc32(json.dumps(facts, sort_keys=True, default=str).encode())
    checksums = group.exchange([float(checksum)])[:, 0]
    if len(set(checksums)) > 1:
        raise UsageError(
            f"the workers of the elastic job differ in flags, versions or code: checksums "
            f"{', '.join(f'{c:.0f}' for c in checksums)} by rank; expected equal ones. Start all workers "
            "with the same command and packages."
        )
