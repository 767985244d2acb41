"""Reading of the topology from the environment, and its conversion to TF_CONFIG for TensorFlow.

TF_CONFIG has priority over the variables of Vertex AI, Kubernetes, SageMaker, Slurm and MPI. For an invalid
TF_CONFIG, TensorFlow raises a raw JSON error or waits without a timeout. Here every mistake is one
sentence. Importing this module does not import TensorFlow.
"""

import os
from collections.abc import Mapping, MutableMapping

from ctl.distribute.platforms import listed, mpi, sagemaker, slurm, tf_config, vertex
from ctl.distribute.topology import Topology

# by priority: the first reader that returns a topology is used
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
VARIABLES = (*_READERS, *listed.INDICES, listed.EVALUATOR)  # hidden from processes of other jobs


def read_topology(environ: Mapping[str, str] = os.environ) -> Topology:
    """Reads the environment. Without a description of a cluster, the job is this process only.

    If TF_CONFIG is set, it is used: `{}` means one process, regardless of other variables. The next ones
    are Vertex AI's CLUSTER_SPEC, CTL_WORKERS with an index, MPI, Slurm and SageMaker. Raises UsageError
    that names the mistake.
    """
    listed.check_names(environ)
    for reader in _READERS.values():
        topology = reader(environ)
        if topology is not None:
            return topology
    return Topology()


def also_set(environ: Mapping[str, str], topology: Topology) -> list[str]:
    """Returns variables that can describe a cluster, but have a lower priority than the one used."""
    return [n for n in _READERS if environ.get(n, "").strip() and n not in topology.sources]


def normalise(topology: Topology, environ: MutableMapping[str, str] = os.environ) -> None:
    """Writes the cluster to the TF_CONFIG that TensorFlow reads."""
    if topology.tasks:
        environ["TF_CONFIG"] = topology.tf_config()


def apply_settings(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets variables that the platform leaves to the program, such as the GPUs of this task.

    Must be called before TensorFlow lists the devices.
    """
    environ.update(read_topology(environ).settings)
