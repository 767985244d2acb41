"""Addresses in CTL_WORKERS with an index from the platform: Kubernetes' Indexed Jobs, MPI.

CTL_WORKERS is equal in all processes of a job, so one manifest or one `mpirun -x` serves all of them:

    CTL_WORKERS=train-0.train:2222,train-1.train:2222    JOB_COMPLETION_INDEX=1
"""

from collections.abc import Mapping

from ctl.distribute.platforms import variables
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

WORKERS_VARIABLE = "CTL_WORKERS"
EVALUATOR = "CTL_EVALUATOR"
TASK_INDEX = "CTL_TASK_INDEX"
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"
INDICES = {
    TASK_INDEX: "CTL_WORKERS",
    KUBERNETES_INDEX: "Kubernetes",
    "OMPI_COMM_WORLD_RANK": "Open MPI",
    "PMI_RANK": "MPI",
    "SLURM_PROCID": "Slurm",
    "HOROVOD_RANK": "Horovod",
}
_NAMES = (WORKERS_VARIABLE, TASK_INDEX, EVALUATOR, variables.PORT_VARIABLE)
_SIZES = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "SLURM_PROCID": "SLURM_NTASKS",
    "HOROVOD_RANK": "HOROVOD_SIZE",
}


def read(environ: Mapping[str, str]) -> Topology | None:
    """Returns the topology from CTL_WORKERS, or None if it is not set. Raises UsageError."""
    text = environ.get(WORKERS_VARIABLE, "").strip()
    if not text:
        return None
    addresses = [a.strip() for a in text.split(",")]
    for i, address in enumerate(addresses):
        variables.check_address(address, WORKERS_VARIABLE, f"task {i}")
    counter = next((n for n in INDICES if environ.get(n, "").strip()), None)
    if counter is None:
        raise UsageError(
            f"CTL_WORKERS lists {len(addresses)} addresses, but no variable has the index of this "
            f"process; expected one of {', '.join(INDICES)}. Set CTL_TASK_INDEX to 0 in the first "
            "process, 1 in the second, and so on."
        )
    index = variables.number(environ, counter) or 0
    size = variables.number(environ, _SIZES[counter]) if counter in _SIZES else None
    if size is not None and size != len(addresses):
        raise UsageError(
            f"CTL_WORKERS lists {len(addresses)} addresses, but {_SIZES[counter]} is {size}; expected "
            "one address for each process."
        )
    if index >= len(addresses):
        raise UsageError(
            f"{counter} is {index}, but CTL_WORKERS lists {len(addresses)} addresses (index 0 to "
            f"{len(addresses) - 1})."
        )
    has_evaluator = environ.get(EVALUATOR, "") not in ("", "0")
    sources = [WORKERS_VARIABLE, counter, *([EVALUATOR] if has_evaluator else [])]
    return variables.workers(INDICES[counter], sources, addresses, index, has_evaluator=has_evaluator)


def check_names(environ: Mapping[str, str]) -> None:
    """Raises UsageError for a name that resembles a variable that defines the cluster."""
    for name, value in environ.items():
        if not name.startswith("CTL_") or name.startswith("CTL_HVD_") or not value.strip():
            continue
        suggestion = variables.nearest(name, _NAMES)
        if suggestion is not None and name not in _NAMES:
            raise UsageError(
                f"the environment has {name}, which ctl does not read; did you mean {suggestion}? Rename "
                "it, or unset it. Without its value this process could train alone."
            )


def check_index_alone(environ: Mapping[str, str]) -> None:
    """Raises UsageError for CTL_TASK_INDEX without the list of addresses that it refers to."""
    index = environ.get(TASK_INDEX, "").strip()
    if index:
        raise UsageError(
            f"CTL_TASK_INDEX is {index}, but CTL_WORKERS is not set; expected the host:port of all workers "
            "in the order of their indices, e.g. CTL_WORKERS=host1:2222,host2:2222. For a process that "
            "trains alone, unset CTL_TASK_INDEX."
        )


def read_bare_index(environ: Mapping[str, str]) -> Topology | None:
    """Returns the topology of an Indexed Job without addresses: independent processes, with a note."""
    if not environ.get(KUBERNETES_INDEX):
        return None
    return Topology(
        platform="Kubernetes",
        sources=(KUBERNETES_INDEX,),
        notes=(
            "JOB_COMPLETION_INDEX is set and CTL_WORKERS is not, so this process trains alone. If the "
            "pods are one training, set CTL_WORKERS to the host:port of all of them, in their order; "
            "`ctl deploy kubernetes` does.",
        ),
    )
