"""Processes and devices of a job."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.distribute import parameter_servers, strategies
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.distribute.strategy_kind import StrategyKind, kind_of, strategy_name
from ctl.distribute.topology import Topology


@dataclass(frozen=True)
class World:
    """The processes and devices of a job.

    Attributes:
      strategy: Strategy that distributes the steps.
      topology: Processes of the job, and the rank of this one.
      kind: Kind of the strategy.
      host_all_reduce: Sums of small arrays over workers, outside of steps.
    """

    strategy: tf.distribute.Strategy
    topology: Topology
    kind: StrategyKind
    host_all_reduce: HostAllReduce

    @classmethod
    def of(cls, strategy: tf.distribute.Strategy, topology: Topology | None = None) -> World:
        """Returns the world of a strategy; the topology defaults to that of the strategy."""
        topology = strategies.topology_of(strategy) if topology is None else topology
        return cls(strategy, topology, kind_of(strategy), HostAllReduce(strategy, topology))

    @property
    def strategy_name(self) -> str:
        """Name of the strategy: its setting, or its class."""
        return strategy_name(self.strategy)

    @property
    def is_asynchronous(self) -> bool:
        """True if workers compute steps independently, with the variables on parameter servers."""
        return self.kind is StrategyKind.PARAMETER_SERVER

    @property
    def has_peers(self) -> bool:
        """True if other processes take part in the training."""
        return self.topology.num_workers > 1 or self.is_asynchronous

    @property
    def num_training_workers(self) -> int:
        """Number of processes that compute steps."""
        if self.is_asynchronous:
            return parameter_servers.num_workers(self.strategy)
        return self.topology.num_workers

    @property
    def local_strategy(self) -> tf.distribute.Strategy:
        """Strategy for work within this process."""
        return strategies.local(self.strategy)

    @property
    def is_chief(self) -> bool:
        """True in the process that writes shared files."""
        return self.topology.is_chief

    def counter_scope(self, *, is_compiled: bool) -> AbstractContextManager[Any]:
        """Returns the scope in which the step counter is created; `is_compiled`: XLA compiles the step."""
        return strategies.counter_scope(self.strategy, is_compiled=is_compiled)

    def wait_for_all_workers(self) -> None:
        """Returns when all workers have called it."""
        self.host_all_reduce.sum([0.0])
