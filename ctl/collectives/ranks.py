"""Rank, size and addresses of a job. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """Ranks of this process.

    Attributes:
      rank, size: Among all processes.
      local_rank, local_size: Among the processes of this host.
      cross_rank, cross_size: Among the processes with this local rank on all hosts.
      addresses: "host:port" at which each rank listens, by rank. Empty for a job of one process.
      generation: Number of the group in an elastic job. Ranks of two generations never connect.
      is_homogeneous: True if all hosts have the same number of ranks.
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


def among(addresses: Sequence[str], rank: int, generation: int = 0) -> Ranks:
    """Returns the ranks of process `rank` among "host:port" addresses. Equal host names are one host."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    here = [i for i, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = here.index(rank)
    order = list(dict.fromkeys(hosts))
    wide = [host for host in order if hosts.count(host) > local_rank]
    return Ranks(
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
