"""Tree over which the ranks exchange messages with the coordinator on rank 0.

    tree = ControlTree(1024)
    tree.subtrees(0)      -> (range(1, 32), range(32, 64), ...): 32 subtrees
    tree.children(0)      -> [1, 32, ...], the lowest rank of each subtree
    tree.parent(70)       -> 64

With up to 33 ranks, all ranks are connected to rank 0.
"""

import itertools
from dataclasses import dataclass

FANOUT = 32


@dataclass(frozen=True)
class ControlTree:
    """The connections for messages between `count` ranks.

    Attributes:
      count: Number of ranks.
      fanout: Maximum number of subtrees of a rank.
    """

    count: int
    fanout: int = FANOUT

    def members(self, rank: int) -> range:
        """Returns a rank and the ranks below it."""
        return self._descend(rank)[1]

    def subtrees(self, rank: int) -> tuple[range, ...]:
        """Returns the ranks of each subtree of a rank. The first rank of a subtree is its root."""
        return self._split(self.members(rank)[1:])

    def parent(self, rank: int) -> int:
        """Returns the rank to which a rank other than 0 sends its messages."""
        return self._descend(rank)[0]

    def children(self, rank: int) -> list[int]:
        """Returns the ranks that send their messages to a rank."""
        return [subtree[0] for subtree in self.subtrees(rank)]

    def num_connections(self, rank: int) -> int:
        """Returns the number of sockets of a rank for messages."""
        num_subtrees = len(self.subtrees(rank))
        return num_subtrees + (3 if num_subtrees and rank else 1)  # a relay is connected to its own engine

    def _descend(self, rank: int) -> tuple[int, range]:
        """Returns the parent of a rank, and the rank with those below it."""
        parent, members = 0, range(self.count)
        while members[0] != rank:
            parent, members = members[0], members[1:]
            count, num_parts = len(members), min(self.fanout, len(members))
            i = ((rank - members[0] + 1) * num_parts - 1) // count  # the part with the rank
            members = members[count * i // num_parts : count * (i + 1) // num_parts]
        return parent, members

    def _split(self, members: range) -> tuple[range, ...]:
        count, num_parts = len(members), min(self.fanout, len(members))
        bounds = [count * i // num_parts for i in range(num_parts + 1)] if num_parts else [0]
        return tuple(members[start:end] for start, end in itertools.pairwise(bounds))
