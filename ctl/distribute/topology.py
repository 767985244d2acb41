"""Which process this is, of how many, and where the others listen: one frozen object, read once.

    topology = detection.read_topology()                    # from the environment; no TensorFlow
    topology = strategies.topology_of(strategy)    # the same with the replicas of a strategy
    trainer.topology.is_chief

Whoever has to know gets it handed on. Pure data; importing this never imports TensorFlow.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TRAINING_TYPES = ("chief", "worker")


@dataclass(frozen=True)
class Topology:
    """The processes of one job, this process's place among them, and the replicas that they train.

    Attributes:
      tasks: task type -> addresses "host:port"; empty for a job of one process.
      task_type: "chief", "worker", "ps" or "evaluator".
      task_index: this task's index within its type.
      num_replicas, num_local_replicas: over all workers, and in this process.
      has_evaluator: another process of the job evaluates the checkpoints.
      ends_with_chief: the platform ends all others as soon as the chief has ended.
      platform: who says so, for people; "" where nobody does.
      sources: the variables that were read.
      settings: variables to set before TensorFlow starts, e.g. which GPUs are this task's.
      notes: sentences about what was left out, or looks wrong.
      port_variable: the variable that chooses the port of this task's address.
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
        """Addresses of the processes that train, by rank: the chief first, then workers in order."""
        return tuple(address for kind in TRAINING_TYPES for address in self.tasks.get(kind, ()))

    @property
    def num_workers(self) -> int:
        """Processes that train: chief and workers; at least 1."""
        return max(1, len(self.workers))

    @property
    def worker_index(self) -> int:
        """This process's rank among those that train."""
        return self.task_index + (len(self.tasks.get("chief", ())) if self.task_type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """True for the one process that writes shared files."""
        return self.task_type in TRAINING_TYPES and self.worker_index == 0

    @property
    def evaluates(self) -> bool:
        """True for a process that does not train, but evaluates what the chief has saved."""
        return self.task_type == "evaluator"

    @property
    def address(self) -> str | None:
        """This task's own "host:port", or None in a job of one process."""
        addresses = self.tasks.get(self.task_type, ())
        return addresses[self.task_index] if self.task_index < len(addresses) else None

    def without_servers(self) -> "Topology":
        """For training in step, which would wait for a `ps` task for ever; itself, if this is one."""
        if self.task_type not in TRAINING_TYPES:
            return self
        return replace(self, tasks={k: v for k, v in self.tasks.items() if k in TRAINING_TYPES})

    def tf_config(self) -> str:
        """The TF_CONFIG that says the same to TensorFlow."""
        return json.dumps(
            {
                "cluster": {k: list(v) for k, v in self.tasks.items()},
                "task": {"type": self.task_type, "index": self.task_index},
            }
        )
