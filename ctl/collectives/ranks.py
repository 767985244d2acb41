"""Rank, size and addresses of the processes of a job."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """Ranks of this process.

    Attributes:
      rank, size: Rank of this process and number of all processes.
      local_rank, local_size: The same for the processes of this host.
      cross_rank, cross_size: The same for the processes with this local rank on all hosts.
      addresses: "host:port" at which each rank listens, by rank. Empty for a job of one process.
      generation: Number of the group in an elastic job. Ranks of different generations never connect.
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

    @functools.cached_property
    def machine_by_rank(self) -> tuple[int, ...]:
        """Number of the machine of each rank. Ranks with equal host names are on one machine."""
        hosts = [address.rpartition(":")[0] for address in self.addresses]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return tuple(numbers[host] for host in hosts)


def build_ranks(addresses: Sequence[str], rank: int, generation: int = 0) -> Ranks:
    """Builds the ranks of process `rank` from the "host:port" addresses of all processes.

    Addresses with equal host names are on one host.
    """
    hosts = [address.rpartition(":")[0] for address in addresses]
    local_ranks = [i for i, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = local_ranks.index(rank)
    unique_hosts = list(dict.fromkeys(hosts))
    hosts_with_local_rank = [host for host in unique_hosts if hosts.count(host) > local_rank]
    return Ranks(
        rank=rank,
        size=len(addresses),
        local_rank=local_rank,
        local_size=len(local_ranks),
        cross_rank=hosts_with_local_rank.index(hosts[rank]),
        cross_size=len(hosts_with_local_rank),
        addresses=tuple(addresses),
        generation=generation,
        is_homogeneous=len({hosts.count(host) for host in unique_hosts}) == 1,
    )
