"""Ranks of a new group of an elastic job, as the fields of `ctl.collectives.ranks.Ranks`."""

from collections.abc import Iterator, Mapping
from typing import Any

from ctl.launch.membership import Group


def build_assignments(group: Group, address_by_host: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yields the assignment of each worker, in the order of ranks.

    Args:
      group: The group. Its workers are ordered by rank.
      address_by_host: Address at which the workers of a host listen.
    """
    slots_of_host: dict[str, list[int]] = {}
    hosts_of_slot: dict[int, list[str]] = {}
    cross_ranks = []
    for worker in group.workers:
        host, index = worker.slot.host, worker.slot.index
        slots_of_host.setdefault(host, []).append(index)
        hosts = hosts_of_slot.setdefault(index, [])
        cross_ranks.append(len(hosts))
        hosts.append(host)
    is_homogeneous = len(set(map(len, slots_of_host.values()))) == 1
    rank_addresses = [
        f"{address_by_host[worker.slot.host]}:{port}"
        for worker, port in zip(group.workers, group.ports, strict=True)
    ]
    for rank, worker in enumerate(group.workers):
        yield {
            "rank": rank,
            "size": len(rank_addresses),
            "local_rank": worker.slot.index,
            "local_size": len(slots_of_host[worker.slot.host]),
            "cross_rank": cross_ranks[rank],
            "cross_size": len(hosts_of_slot[worker.slot.index]),
            "addresses": rank_addresses,
            "generation": group.number,
            "is_homogeneous": is_homogeneous,
        }
