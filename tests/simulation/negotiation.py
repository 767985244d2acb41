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
      relay_secs: A relay, for its own message to its parent.
      relay_rank_secs: The same, in addition for each rank of its subtree.
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
    negotiation = _Negotiation(costs, factors, latency_secs)
    root = _Source(tree, 0, tree.members(0))
    negotiation.distribute(root, negotiation.collect(root))
    return negotiation.answered_at, negotiation.cpu_secs


class _Source:
    """A rank, and the sources of the messages that it combines: itself and the subtrees below it."""

    def __init__(self, tree: ControlTree, rank: int, members: range):
        self.rank, self.num_ranks = rank, len(members)
        self.sources: list[_Source] = []
        if self.num_ranks > 1:
            parts = [range(rank, rank + 1), *tree.subtrees(rank)]
            self.sources = [_Source(tree, part[0], part) for part in parts]


class _Negotiation:
    """Requests and responses. Arrays `[count]` have the times of a rank."""

    def __init__(self, costs: NegotiationCosts, factors: np.ndarray, latency_secs: float):
        self._costs, self._factors, self._latency_secs = costs, factors, latency_secs
        self.answered_at = np.zeros(len(factors))
        self.cpu_secs = factors * costs.request_secs

    def collect(self, root: _Source) -> float:
        """Returns the time at which a rank has the requests of all ranks below it."""
        if not root.sources:
            return self._request_secs(root)
        arrivals = [
            (self.collect(source) + self._latency(root, source), self._message_secs(root, source))
            for source in root.sources
        ]
        combined_at = 0.0
        for arrived_at, secs in sorted(arrivals):
            combined_at = max(combined_at, arrived_at) + secs
        secs = self._relay_secs(root)
        self.cpu_secs[root.rank] += 2 * (secs + sum(secs for _, secs in arrivals))
        return combined_at + secs

    def distribute(self, root: _Source, received_at: float) -> None:
        """Sends the response to a rank and those below it.

        Rank 0 sends it to the highest rank first and to itself last, as `Coordinator` does. A relay uses
        the order of ranks.
        """
        if not root.sources:
            self.answered_at[root.rank] = received_at + self._request_secs(root)
        sent_at = received_at + self._relay_secs(root)
        for source in root.sources if root.rank else reversed(root.sources):
            sent_at += self._message_secs(root, source)
            self.distribute(source, sent_at + self._latency(root, source))

    def _latency(self, root: _Source, source: _Source) -> float:
        return 0.0 if source.rank == root.rank else self._latency_secs

    def _request_secs(self, rank: _Source) -> float:
        return float(self._factors[rank.rank]) * self._costs.request_secs / 2

    def _relay_secs(self, root: _Source) -> float:
        is_relay = root.rank > 0 and root.sources
        return float(self._factors[root.rank]) * self._costs.relay_secs / 2 if is_relay else 0.0

    def _message_secs(self, root: _Source, source: _Source) -> float:
        """Returns the CPU time of a rank for the message of a source."""
        costs = self._costs
        if root.rank:
            secs = source.num_ranks * costs.relay_rank_secs
        elif source.num_ranks > 1:
            secs = costs.combined_secs + source.num_ranks * costs.combined_rank_secs
        else:
            secs = costs.coordinator_secs
        return float(self._factors[root.rank]) * secs / 2
