"""Pairs of ranks that exchange data in the algorithms of a group."""

import functools
from collections.abc import Sequence


@functools.lru_cache(maxsize=64)
def partners_of(count: int) -> tuple[frozenset[int], ...]:
    """Returns the partners of each of `count` ranks, about 2 log2(count) for each.

    These are the ranks at a distance of a power of two on the ring, for `rings`, `trees` and the folds of
    `allreduce`, and the partners of recursive doubling in `allreduce`.
    """
    partners: list[set[int]] = [set() for _ in range(count)]
    distances = [1 << i for i in range((count - 1).bit_length())]
    for rank in range(count):
        for distance in distances:
            _add_pair(partners, rank, (rank + distance) % count)
    num_active = 1 << (count.bit_length() - 1)
    for index in range(num_active):
        for distance in distances:
            if index ^ distance < num_active:
                _add_pair(partners, active_rank(index, count), active_rank(index ^ distance, count))
    return tuple(frozenset(ranks) for ranks in partners)


def active_rank(index: int, count: int) -> int:
    """Returns the rank with an index among the active ranks of recursive doubling.

    Active ranks execute its steps. Their number is the largest power of two that is at most `count`.
    """
    num_folds = count - (1 << (count.bit_length() - 1))
    return 2 * index + 1 if index < num_folds else index + num_folds


def peers_of(rank: int, members: Sequence[int], *, all_pairs: bool) -> set[int]:
    """Returns the ranks to which `rank` needs a link for the collectives of `members`.

    Args:
      rank: One of the members.
      members: Participating ranks in order.
      all_pairs: True for algorithms in which each rank exchanges with all others.
    """
    if all_pairs:
        return set(members) - {rank}
    return {members[i] for i in partners_of(len(members))[members.index(rank)]}


def are_connected_at_start(size: int, members: Sequence[int], *, all_pairs: bool) -> bool:
    """Returns True if the links that all `size` ranks create at the start suffice for `members`.

    The result is equal on all ranks.
    """
    if len(members) == size and not all_pairs:
        return True
    connected = partners_of(size)
    return all(peers_of(rank, members, all_pairs=all_pairs) <= connected[rank] for rank in members)


def _add_pair(partners: list[set[int]], rank: int, other: int) -> None:
    if rank != other:
        partners[rank].add(other)
        partners[other].add(rank)
