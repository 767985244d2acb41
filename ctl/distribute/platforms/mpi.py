"""Launchers of MPI and Horovod, which number the processes without their addresses.

On one machine all addresses are local. On several machines they come from CTL_WORKERS
(`mpirun -x CTL_WORKERS=...`) or from the list of hosts of the surrounding Slurm job.
"""

import zlib
from collections.abc import Mapping
from typing import Any

from ctl.distribute.platforms import slurm, variables
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

_FIRST_PORT = 15000
_PORTS = 16000
# platform -> rank, size, local rank, local size, variables that differ between two jobs
_LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        (
            "PMIX_NAMESPACE",
            "OMPI_MCA_ess_base_jobid",
            "OMPI_MCA_orte_ess_jobid",
            "OMPI_MCA_orte_hnp_uri",
            "SLURM_JOB_ID",
        ),
    ),
    "Horovod": (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        ("HOROVOD_GLOO_RENDEZVOUS_PORT",),
    ),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("SLURM_JOB_ID",)),
}


def read(environ: Mapping[str, str]) -> Topology | None:
    """Returns the topology from Open MPI, horovodrun, MPICH or compatible launchers. Raises UsageError.

    Returns None if the variables of these launchers are not set.
    """
    for platform, (rank_name, size_name, *local_names, markers) in _LAUNCHERS.items():
        rank, size = variables.number(environ, rank_name), variables.number(environ, size_name)
        if rank is None or _is_srun_s(environ, rank_name):
            continue
        if size is None:
            if rank_name == "PMI_RANK":  # process managers of other programs set PMI_RANK only
                continue
            raise UsageError(
                f"{rank_name} is {rank}, but {size_name} is not set; expected both. {platform} sets them "
                f"for each process. For a process that trains alone, unset {rank_name}."
            )
        if rank >= size:
            raise UsageError(f"{rank_name} is {rank}, but {size_name} is {size} (ranks 0 to {size - 1}).")
        sources = rank_name, size_name, *local_names
        if size == 1:
            return Topology(platform=platform, sources=(rank_name, size_name))
        if variables.number(environ, local_names[1]) == size:
            marker = next((environ[m] for m in markers if environ.get(m)), "")
            spread = zlib.crc32(marker.encode()) % (_PORTS // size) * size
            first = variables.port(environ, _FIRST_PORT + spread)
            addresses = [f"127.0.0.1:{first + i}" for i in range(size)]
            return variables.workers(
                platform, sources, addresses, rank, port_variable=variables.PORT_VARIABLE
            )
        return _over_hosts(environ, platform, rank, size, sources)
    return None


def _is_srun_s(environ: Mapping[str, str], rank_name: str) -> bool:
    """Returns True if srun has set PMI_RANK. Slurm's own variables contain more information."""
    same = environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
    return rank_name == "PMI_RANK" and same and environ.get("PMI_SIZE") == environ.get("SLURM_NTASKS")


def _over_hosts(environ: Any, platform: str, rank: int, size: int, sources: Any) -> Topology:
    listed = environ.get("SLURM_JOB_NODELIST", "").strip()
    per_host = environ.get("SLURM_TASKS_PER_NODE", "").strip()
    if listed and per_host:
        hosts = slurm.host_names(listed)
        placed = slurm.placed_in_blocks(hosts, slurm.tasks_of_hosts(per_host, len(hosts)))
        if len(placed) == size:
            addresses = slurm.addresses(environ, placed)
            used = *sources, "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_JOB_ID"
            return variables.workers(platform, used, addresses, rank, port_variable=variables.PORT_VARIABLE)
    raise UsageError(
        f"{platform} started {size} processes on several machines and does not name the machines. Add "
        "-x CTL_WORKERS=host1:2222,host2:2222 to the command, with one address for each process in "
        "the order of their ranks; or use --communication=mpi or CTL_COLLECTIVES=mpi; or start them with "
        "`ctlrun -np N -H host1:1,host2:1`."
    )
