"""Machines of the ranks of a collective, and the choice of an algorithm that considers their networks.

The ranks of a machine share its network card. In recursive doubling and halving all of them send to other
machines. On a ring of consecutive ranks, and in `machine_allreduce`, one rank of each machine does.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from ctl.collectives.allreduce import select_algorithm
from ctl.collectives.partners import active_rank, partners_of
from ctl.collectives.transfer_costs import BYTE_SECS, HALVED_BYTE_SECS, ONE_MACHINE, NetworkCosts

MACHINES = "machines"  # one of `settings.COLLECTIVE_ALGORITHMS`
_WHOLE_BYTE_SECS = 0.5e-9  # of a byte of a whole vector that a rank sends, receives and reduces


@dataclasses.dataclass(frozen=True)
class Machines:
    """Machines of the ranks of a collective.

    Attributes:
      groups: Ranks of each machine, in the order of the collective. The first one is the leader.
      ring_senders: Largest number of ranks of a machine that send to another machine on a ring.
      ring_crossings: The same for all machines together.
      step_senders: For the distances 1, 2, 4 and so on of recursive doubling, the largest number of ranks
        of a machine that exchange with another machine.
      fold_senders: The same for the fold of recursive doubling.
      most_senders: Largest number of ranks of a machine that send to another machine if all ranks send to
        the rank at a distance of 1, 2, 4 or so on, as `network_measurement` does.
    """

    groups: tuple[tuple[int, ...], ...]
    ring_senders: int
    ring_crossings: int
    step_senders: tuple[int, ...]
    fold_senders: int
    most_senders: int

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each machine."""
        return tuple(group[0] for group in self.groups)

    @property
    def num_ranks(self) -> int:
        """Number of the ranks on all machines."""
        return sum(map(len, self.groups))

    @property
    def are_shared(self) -> bool:
        """True if there are several machines and one of them has several ranks."""
        return 1 < len(self.groups) < self.num_ranks


@functools.lru_cache(maxsize=64)
def find_machines(machine_by_rank: tuple[int, ...], ranks: tuple[int, ...]) -> Machines:
    """Returns the machines of a collective.

    Args:
      machine_by_rank: Number of the machine of each rank of the job. Empty: all are on one machine.
      ranks: Participating ranks in order.
    """
    numbers = [machine_by_rank[rank] for rank in ranks] if machine_by_rank else [0] * len(ranks)
    groups: dict[int, list[int]] = {}
    for rank, number in zip(ranks, numbers, strict=True):
        groups.setdefault(number, []).append(rank)
    count = len(ranks)
    num_steps = count.bit_length() - 1
    actives = [active_rank(index, count) for index in range(1 << num_steps)]
    return Machines(
        groups=tuple(map(tuple, groups.values())),
        ring_senders=_count_senders(numbers, ((i, (i + 1) % count) for i in range(count))),
        ring_crossings=sum(numbers[i] != numbers[(i + 1) % count] for i in range(count)),
        step_senders=tuple(
            _count_senders(
                numbers, ((active, actives[i ^ (1 << step)]) for i, active in enumerate(actives))
            )
            for step in range(num_steps)
        ),
        fold_senders=_count_senders(numbers, ((2 * i, 2 * i + 1) for i in range(count - len(actives)))),
        most_senders=max(
            _count_senders(numbers, ((i, (i + (1 << step)) % count) for i in range(count)))
            for step in range(num_steps + 1)
        ),
    )


@functools.lru_cache(maxsize=256)
def are_tree_connected(count: int, group: tuple[int, ...]) -> bool:
    """Returns True if the links of the start suffice for trees and chains from the first rank of a group.

    Args:
      count: Number of ranks of the job.
      group: Ranks of one machine.
    """
    distances = [1 << i for i in range((len(group) - 1).bit_length())]
    pairs = [pair for distance in distances for pair in zip(group, group[distance:], strict=False)]
    return count > 0 and all(peer in partners_of(count)[rank] for rank, peer in pairs)


def costs_of_one_sender(machine_by_rank: tuple[int, ...], network: NetworkCosts) -> NetworkCosts:
    """Returns the costs if one rank of each machine sends.

    Args:
      machine_by_rank: Number of the machine of each rank of the job.
      network: Costs that all ranks have measured while all of them sent.
    """
    if not machine_by_rank:
        return network
    everyone = find_machines(machine_by_rank, tuple(range(len(machine_by_rank))))
    return network._replace(byte_secs=network.byte_secs / max(1, everyone.most_senders))


@functools.lru_cache(maxsize=256)
def select_on_machines(machines: Machines, num_bytes: int, network: NetworkCosts, *, is_wide: bool) -> str:
    """Returns the all-reduce algorithm with the shortest estimated time for ranks on shared machines.

    Args:
      machines: Machines of the ranks.
      num_bytes: Size of the vector of a rank.
      network: Costs if one rank of each machine sends.
      is_wide: True for sums of 16-bit floats in float32.
    """
    seconds = {
        name: _estimate(machines, name, num_bytes, network, is_wide=is_wide)
        for name in ("ring", "doubling", "halving")
    }
    sent_bytes = _sent_bytes(num_bytes, is_wide=is_wide)
    seconds[MACHINES] = _estimate_local(machines, num_bytes, sent_bytes) + _estimate(
        _one_rank_each(len(machines.groups)),
        select_between_leaders(machines, sent_bytes, network),
        sent_bytes,
        network,
        is_wide=False,
    )
    return min(seconds, key=lambda name: seconds[name])


def select_between_leaders(machines: Machines, num_bytes: int, network: NetworkCosts) -> str:
    """Returns the algorithm of the leaders for vectors of this size.

    It is recursive doubling for every size for which as many ranks on separate machines would use it. Then
    results do not depend on the number of machines, if each one has the same number of consecutive ranks, a
    power of two.

    Args:
      machines: Machines of the ranks.
      num_bytes: Size of the vector of a leader.
      network: Costs if one rank of each machine sends.
    """
    if select_algorithm(machines.num_ranks, num_bytes, network) == "doubling":
        return "doubling"
    return select_algorithm(len(machines.groups), num_bytes, network)


def _one_rank_each(count: int) -> Machines:
    return find_machines(tuple(range(count)), tuple(range(count)))


def _sent_bytes(num_bytes: int, *, is_wide: bool) -> int:
    """Returns the size of a vector in exchanges of whole vectors and of their halves."""
    return num_bytes * (2 if is_wide else 1)


def _estimate(
    machines: Machines, algorithm: str, num_bytes: int, network: NetworkCosts, *, is_wide: bool
) -> float:
    """Returns the estimated time of an algorithm in which all ranks exchange (seconds).

    Args:
      machines: Machines of the ranks.
      algorithm: "ring", "doubling" or "halving".
      num_bytes: Size of the vector of a rank.
      network: Costs if one rank of each machine sends.
      is_wide: True for sums of 16-bit floats in float32.
    """

    def exchange_secs(size: float, senders: int, cpu_byte_secs: float) -> float:
        shared = network._replace(byte_secs=senders * network.byte_secs) if senders else ONE_MACHINE
        return shared.exchanges(1, size, cpu_byte_secs)

    count = machines.num_ranks
    if algorithm == "ring":
        senders = machines.ring_senders  # wide sums: each rank sends its parts to all ranks that sum them
        byte_senders = (max(map(len, machines.groups)) if is_wide else senders) + senders
        part_bytes = num_bytes * (count - 1) / count
        latencies = 2 * machines.ring_crossings * network.latency_secs  # a part waits where it crosses only
        card_secs = byte_senders * part_bytes * network.byte_secs
        return ONE_MACHINE.exchanges(2 * (count - 1), 2 * part_bytes, BYTE_SECS) + latencies + card_secs
    size: float = _sent_bytes(num_bytes, is_wide=is_wide)
    cpu_byte_secs = _WHOLE_BYTE_SECS if algorithm == "doubling" else HALVED_BYTE_SECS
    has_folds = count & (count - 1) != 0
    secs = 2 * has_folds * exchange_secs(size, machines.fold_senders, cpu_byte_secs)
    if algorithm == "doubling":
        return secs + sum(exchange_secs(size, senders, cpu_byte_secs) for senders in machines.step_senders)
    for senders in reversed(machines.step_senders):
        size /= 2
        secs += 2 * exchange_secs(size, senders, cpu_byte_secs)
    return secs


def _estimate_local(machines: Machines, num_bytes: int, sent_bytes: int) -> float:
    """Returns the estimated time of the reduction and the broadcast within the machines (seconds)."""
    num_steps = (max(map(len, machines.groups)) - 1).bit_length()
    reduction_secs = ONE_MACHINE.exchanges(num_steps, num_steps * sent_bytes, _WHOLE_BYTE_SECS)
    return reduction_secs + ONE_MACHINE.exchanges(num_steps, num_steps * num_bytes, BYTE_SECS)


def _count_senders(numbers: Sequence[int], pairs: Iterable[tuple[int, int]]) -> int:
    """Returns the largest number of pairs in which a machine sends to another one.

    Args:
      numbers: Number of the machine of each rank.
      pairs: Pairs (sender, receiver) of indices of `numbers`.
    """
    counts = Counter(numbers[sender] for sender, receiver in pairs if numbers[sender] != numbers[receiver])
    return max(counts.values(), default=0)
