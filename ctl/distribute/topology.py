"""Topology of a job: rank of this process, number of processes and their addresses.

    topology = detection.read_topology()                    # from the environment; no TensorFlow
    topology = strategies.topology_of(strategy)    # the same with the replicas of a strategy
    trainer.topology.is_chief

The topology is read once and passed to the objects that need it. Pure data; importing this module does
not import TensorFlow.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

TRAINING_TYPES = ("chief", "worker")


@dataclass(frozen=True)
class Topology:
    """Processes of one job, the rank of this process, and the replicas.

    Attributes:
      tasks: Task type -> addresses "host:port". Empty for a job of one process.
      task_type: "chief", "worker", "ps" or "evaluator".
      task_index: Index of this task within its type.
      num_replicas, num_local_replicas: Number of replicas of all workers, and of this process.
      has_evaluator: True if another process of the job evaluates the checkpoints.
      ends_with_chief: True if the platform ends all processes as soon as the chief has ended.
      platform: Name of the platform for messages, or an empty string.
      sources: Names of the variables that were read.
      settings: Variables to set before TensorFlow starts, such as the GPUs of this task.
      notes: Messages about ignored or suspicious values.
      port_variable: Name of the variable that selects the port of this task's address.
      ports_change: True if another start of the job has other ports, so that a port in use is no mistake.
    """

    tasks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    task_type: str = "worker"
    task_index: int = 0
    has_evaluator: bool = False
    num_replicas: int = 1
    num_local_replicas: int = 1
    ends_with_chief: bool = field(default=False, compare=False)
    platform: str = field(default="", compare=False)
    sources: tuple[str, ...] = field(default=(), compare=False)
    settings: Mapping[str, str] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    port_variable: str = field(default="TF_CONFIG", compare=False)
    ports_change: bool = field(default=False, compare=False)

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of the training processes by rank: the chief first, then the workers in order."""
        return tuple(address for task_type in TRAINING_TYPES for address in self.tasks.get(task_type, ()))

    @property
    def num_workers(self) -> int:
        """Number of training processes: chief and workers, at least 1."""
        return max(1, len(self.workers))

    @property
    def worker_index(self) -> int:
        """Rank of this process among the training processes."""
        return self.task_index + (len(self.tasks.get("chief", ())) if self.task_type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """True in the process that writes shared files."""
        return self.task_type in TRAINING_TYPES and self.worker_index == 0

    @property
    def evaluates(self) -> bool:
        """True in a process that does not train, but evaluates the chief's checkpoints."""
        return self.task_type == "evaluator"

    @property
    def is_elastic(self) -> bool:
        """True if workers may join and leave during a run."""
        return False

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas during a run."""
        return self.num_replicas

    @property
    def min_replicas(self) -> int:
        """Smallest number of replicas during a run."""
        return self.num_replicas

    @property
    def replica_count(self) -> Any:
        """Number of replicas when a graph runs: an int, or a variable if the number changes."""
        return self.num_replicas

    @property
    def first_replica(self) -> int:
        """Number of the first replica of this process, constant during a run."""
        return self.worker_index * self.num_local_replicas

    @property
    def address(self) -> str | None:
        """Address of this task as "host:port", or None in a job of one process."""
        addresses = self.tasks.get(self.task_type, ())
        return addresses[self.task_index] if self.task_index < len(addresses) else None

    def without_servers(self) -> "Topology":
        """Returns the topology of synchronous training, which would wait for `ps` tasks without a timeout.

        The topology of a task that does not train is returned unchanged.
        """
        if self.task_type not in TRAINING_TYPES:
            return self
        return replace(self, tasks={k: v for k, v in self.tasks.items() if k in TRAINING_TYPES})

    def tf_config(self) -> str:
        """Returns the equivalent TF_CONFIG."""
        return json.dumps(
            {
                "cluster": {k: list(v) for k, v in self.tasks.items()},
                "task": {"type": self.task_type, "index": self.task_index},
            }
        )
