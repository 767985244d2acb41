"""Negotiation of a collective in virtual time: the requests to rank 0 and its responses, through the tree.

    answered_at, cpu_secs = negotiate(ControlTree(1024), costs, factors, latency_secs=25e-6)

A relay sends one message to its parent as soon as all ranks below it have sent their requests. The real one
also sends a part of them after 1 ms. Rank 0 needs all requests, so its response is not earlier then.
"""

import dataclasses

import numpy as np
from ctl.collectives.control_tree import ControlTree


@dataclasses.dataclass(frozen=True)
class NegotiationCosts:
    """CPU times of a negotiation, half of each for the request and half for the response (seconds).

    Attributes:
      request_secs: A rank, for its own request.
      coordinator_secs: Rank 0, for the request of one rank.
      combined_secs: Rank 0, for the combined request of a subtree.
      combined_rank_secs: The same, in addition for each rank of the subtree.
      relay_secs: A relay, for a message of one rank or of a subtree.
      relay_rank_secs: The same, in addition for each rank of the subtree.
    """

    request_secs: float = 0.0
    coordinator_secs: float = 0.0
    combined_secs: float = 0.0
    combined_rank_secs: float = 0.0
    relay_secs: float = 0.0
    relay_rank_secs: float = 0.0


def negotiate(
    tree: ControlTree, costs: NegotiationCosts, factors: np.ndarray, latency_secs: float
) -> tuple[np.ndarray, np.ndarray]:
    """Simulates a negotiation. All ranks send their requests at time 0.

    Args:
      tree: Connections of the ranks.
      costs: CPU times.
      factors: Factor of the CPU time of each rank `[count]`.
      latency_secs: Time of a message between two ranks.

    Returns:
      The time at which each rank has the response, and its CPU time `[count]`.
    """
    negotiation = _Negotiation(tree, costs, factors, latency_secs)
    root = _Subtree(tree, 0, tree.members(0))
    negotiation.distribute(root, negotiation.collect(root))
    return negotiation.answered_at, negotiation.cpu_secs


class _Subtree:
    """A rank and the subtrees below it."""

    def __init__(self, tree: ControlTree, rank: int, members: range):
        self.rank, self.num_ranks = rank, len(members)
        self.subtrees = (
            [_Subtree(tree, part[0], part) for part in tree.subtrees(rank)] if self.num_ranks > 1 else []
        )


class _Negotiation:
    """Requests and responses. Arrays `[count]` have the times of a rank."""

    def __init__(
        self, tree: ControlTree, costs: NegotiationCosts, factors: np.ndarray, latency_secs: float
    ):
        self._costs, self._factors, self._latency_secs = costs, factors, latency_secs
        self.answered_at = np.zeros(tree.count)
        self.cpu_secs = factors * costs.request_secs

    def collect(self, subtree: _Subtree) -> float:
        """Returns the time at which the root of a subtree has received and combined all requests."""
        rank = subtree.rank
        requested_at = self._factors[rank] * self._costs.request_secs / 2
        if not subtree.subtrees:
            return requested_at
        arrivals = [(requested_at, self._secs(rank, 1))]
        for child in subtree.subtrees:
            arrivals.append((self.collect(child) + self._latency_secs, self._secs(rank, child.num_ranks)))
        ended_at = 0.0
        for arrived_at, secs in sorted(arrivals):
            ended_at = max(ended_at, arrived_at) + secs
        self.cpu_secs[rank] += 2 * sum(secs for _, secs in arrivals)
        return ended_at

    def distribute(self, subtree: _Subtree, received_at: float) -> None:
        """Sends the response to the ranks of a subtree, whose root has it.

        Rank 0 sends the response to the highest rank first and its own one last, as `Coordinator` does.
        A relay sends them in the order of ranks.
        """
        rank, sent_at = subtree.rank, received_at
        own = [None] if subtree.subtrees else []
        receivers = [*reversed(subtree.subtrees), *own] if rank == 0 else [*own, *subtree.subtrees]
        own_at = received_at
        for child in receivers:
            sent_at += self._secs(rank, child.num_ranks if child else 1)
            if child:
                self.distribute(child, sent_at + self._latency_secs)
            else:
                own_at = sent_at
        self.answered_at[rank] = own_at + self._factors[rank] * self._costs.request_secs / 2

    def _secs(self, rank: int, num_ranks: int) -> float:
        """Returns the time of the root of a subtree for one message with the requests of some ranks."""
        costs = self._costs
        if rank:
            secs = costs.relay_secs + num_ranks * costs.relay_rank_secs
        elif num_ranks > 1:
            secs = costs.combined_secs + num_ranks * costs.combined_rank_secs
        else:
            secs = costs.coordinator_secs
        return float(self._factors[rank]) * secs / 2
