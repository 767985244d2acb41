"""Which rank this process is, of how many, and where the others listen. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
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


def among(addresses: Sequence[str], rank: int, generation: int = 0) -> Ranks:
    """The place of `rank` among processes at "host:port" addresses; equal hosts are one host."""
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
