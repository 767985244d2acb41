"""Which rank this process is, of how many, and where the others listen. Pure data."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctl import cluster
from ctl.errors import UsageError
from ctl.platforms import job

_COUNTS = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


@dataclass(frozen=True)
class Placement:
    """This process's place among the ranks.

    Attributes:
      rank, size: among all processes.
      local_rank, local_size: among those of this host.
      cross_rank, cross_size: among those of all hosts that have this local rank.
      addresses: "host:port" at which each rank listens, by rank; empty for a job of one process.
      generation: counts the groups an elastic job went through; ranks of two never meet.
      is_homogeneous: every host has as many ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    addresses: tuple[str, ...] = ()
    generation: int = 0
    is_homogeneous: bool = True


def among(addresses: Sequence[str], rank: int, generation: int = 0) -> Placement:
    """The place of `rank` among processes at "host:port" addresses; equal hosts are one host."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    here = [i for i, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = here.index(rank)
    order = list(dict.fromkeys(hosts))
    wide = [host for host in order if hosts.count(host) > local_rank]
    return Placement(
        rank=rank,
        size=len(addresses),
        local_rank=local_rank,
        local_size=len(here),
        cross_rank=wide.index(hosts[rank]),
        cross_size=len(wide),
        addresses=tuple(addresses),
        generation=generation,
        is_homogeneous=len({hosts.count(host) for host in order}) == 1,
    )


def read(environ: Mapping[str, str] = os.environ) -> Placement:
    """From TF_CONFIG, as `ctl.cluster` reads it; HOROVOD_LOCAL_RANK and the like win where set.

    Without TF_CONFIG the job is this process alone. Raises UsageError where the two contradict each
    other, or HOROVOD_SIZE promises peers that nothing says how to reach.
    """
    found = cluster.read(environ)
    addresses = [a for kind in ("chief", "worker") for a in found.tasks.get(kind, ())]
    if found.task_type not in ("chief", "worker"):
        raise UsageError(
            f"TF_CONFIG's task is {found.task_type} {found.task_index}; ctl.hvd has equal ranks "
            "only, expected a chief or a worker."
        )
    place = among(addresses, found.worker_index) if len(addresses) > 1 else Placement()
    for name, mine in (("RANK", place.rank), ("SIZE", place.size)):
        came = job.number(environ, f"HOROVOD_{name}")
        if came is not None and came != mine:
            raise UsageError(
                f"HOROVOD_{name} is {came}, but TF_CONFIG says {mine}; ctl.hvd finds its peers by "
                "TF_CONFIG. Start the script with `ctlrun -np N` or `ctl launch --workers=N`."
            )
    given: dict[str, Any] = {name.lower(): job.number(environ, f"HOROVOD_{name}") for name in _COUNTS}
    return replace(place, **{name: count for name, count in given.items() if count is not None})
