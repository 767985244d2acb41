"""Who am I: the platform's environment, checked, and normalised before TensorFlow reads it.

TF_CONFIG where it is set; else what Vertex AI, Kubernetes, SageMaker, Slurm or MPI say in words of their
own. TensorFlow's own answers to a bad TF_CONFIG are a raw JSON error at best and an endless wait at
worst. Here every mistake is one sentence. Pure data; importing this never imports TensorFlow.
"""

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from ctl.distribute.platforms import listed, mpi, sagemaker, slurm, tf_config, vertex
from ctl.distribute.platforms.job import TRAINING_TYPES, Job

# the first that has something to say decides
_READERS = {
    tf_config.NAME: tf_config.read,
    vertex.NAME: vertex.read,
    listed.NAME: listed.read,
    "OMPI_COMM_WORLD_RANK": mpi.read,
    "SLURM_PROCID": slurm.read,
    "SM_HOSTS": sagemaker.read,
    listed.KUBERNETES_INDEX: listed.read_bare_index,
}
VARIABLES = (*_READERS, *listed.INDICES, listed.EVALUATOR)  # that a process of another job must not see


@dataclass(frozen=True)
class Cluster:
    """The processes of one job and this process's place among them.

    Attributes:
      tasks: task type -> addresses "host:port"; empty for a job of one process.
      task_type: "chief", "worker", "ps" or "evaluator".
      task_index: this task's index within its type.
      has_evaluator: another process of the job evaluates the checkpoints.
      ends_with_chief: the platform ends all others as soon as the chief has ended.
      platform: who says so, for people; "" where nobody does.
    """

    tasks: Mapping[str, tuple[str, ...]]
    task_type: str = "worker"
    task_index: int = 0
    has_evaluator: bool = False
    ends_with_chief: bool = field(default=False, compare=False)
    platform: str = field(default="", compare=False)

    @property
    def num_workers(self) -> int:
        """Processes that train: chief and workers; at least 1."""
        return max(1, sum(len(self.tasks.get(t, ())) for t in TRAINING_TYPES))

    @property
    def worker_index(self) -> int:
        """This process's rank among those that train: the chief first, then workers in order."""
        return self.task_index + (len(self.tasks.get("chief", ())) if self.task_type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """True for the one process that writes shared files."""
        return self.task_type in TRAINING_TYPES and self.worker_index == 0

    @property
    def address(self) -> str | None:
        """This task's own "host:port", or None in a job of one process."""
        addresses = self.tasks.get(self.task_type, ())
        return addresses[self.task_index] if self.task_index < len(addresses) else None

    def tf_config(self) -> str:
        """The TF_CONFIG that says the same to TensorFlow."""
        return json.dumps(
            {
                "cluster": {k: list(v) for k, v in self.tasks.items()},
                "task": {"type": self.task_type, "index": self.task_index},
            }
        )


def read(environ: Mapping[str, str] = os.environ, *, parameter_servers: bool = False) -> Cluster:
    """Reads the environment; where it tells of no cluster, the cluster is this process alone.

    TF_CONFIG decides if it is set: `{}` means alone, whatever else is there. Then come Vertex AI's
    CLUSTER_SPEC, CTL_WORKERS with an index, MPI, Slurm and SageMaker.
    A `ps` entry is dropped unless this task is one: synchronous training would wait for it for ever.
    With `parameter_servers` it stays. Raises UsageError that names the mistake.
    """
    job = job_of(environ)
    tasks = job.tasks
    if job.task_type in TRAINING_TYPES and not parameter_servers:
        tasks = {k: v for k, v in tasks.items() if k in TRAINING_TYPES}
    return Cluster(
        tasks, job.task_type, job.task_index, job.has_evaluator, job.ends_with_chief, job.platform
    )


def job_of(environ: Mapping[str, str] = os.environ) -> Job:
    """What the platform says, with its variables and notes; raises UsageError."""
    for reader in _READERS.values():
        job = reader(environ)
        if job is not None:
            return job
    return Job("")


def also_set(environ: Mapping[str, str], job: Job) -> list[str]:
    """Variables that could tell of a cluster, and were not asked because another one decided."""
    return [name for name in _READERS if environ.get(name, "").strip() and name not in job.sources]


def normalise(cluster: Cluster, environ: MutableMapping[str, str] = os.environ) -> None:
    """Writes the cluster back as the TF_CONFIG that TensorFlow will read."""
    if cluster.tasks:
        environ["TF_CONFIG"] = cluster.tf_config()


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what the platform left to the program, e.g. which GPUs are this task's; before TensorFlow
    looks for them."""
    environ.update(job_of(environ).settings)
