"""Reads the topology from the environment, and normalises it before TensorFlow reads it.

TF_CONFIG where it is set; else what Vertex AI, Kubernetes, SageMaker, Slurm or MPI say in words of their
own. TensorFlow's own answers to a bad TF_CONFIG are a raw JSON error at best and an endless wait at
worst. Here every mistake is one sentence. Importing this never imports TensorFlow.
"""

import os
from collections.abc import Mapping, MutableMapping

from ctl.distribute.platforms import listed, mpi, sagemaker, slurm, tf_config, vertex
from ctl.distribute.topology import Topology

# the first that has something to say decides
_READERS = {
    tf_config.TF_CONFIG: tf_config.read,
    vertex.CLUSTER_SPEC: vertex.read,
    listed.WORKERS_VARIABLE: listed.read,
    "OMPI_COMM_WORLD_RANK": mpi.read,
    "SLURM_PROCID": slurm.read,
    "SM_HOSTS": sagemaker.read,
    "CTL_TASK_INDEX": listed.check_index_alone,
    listed.KUBERNETES_INDEX: listed.read_bare_index,
}
VARIABLES = (*_READERS, *listed.INDICES, listed.EVALUATOR)  # that a process of another job must not see


def read_topology(environ: Mapping[str, str] = os.environ) -> Topology:
    """Reads the environment; where it tells of no cluster, the job is this process alone.

    TF_CONFIG decides if it is set: `{}` means alone, whatever else is there. Then come Vertex AI's
    CLUSTER_SPEC, CTL_WORKERS with an index, MPI, Slurm and SageMaker. Raises UsageError that names the
    mistake.
    """
    listed.check_names(environ)
    for reader in _READERS.values():
        found = reader(environ)
        if found is not None:
            return found
    return Topology()


def also_set(environ: Mapping[str, str], topology: Topology) -> list[str]:
    """Variables that could tell of a cluster, and were not asked because another one decided."""
    return [n for n in _READERS if environ.get(n, "").strip() and n not in topology.sources]


def normalise(topology: Topology, environ: MutableMapping[str, str] = os.environ) -> None:
    """Writes the cluster back as the TF_CONFIG that TensorFlow will read."""
    if topology.tasks:
        environ["TF_CONFIG"] = topology.tf_config()


def apply_settings(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what the platform left to the program, e.g. which GPUs are this task's; before TensorFlow
    looks for them."""
    environ.update(read_topology(environ).settings)
