"""Collectives that a node of a graph asked for, until another node takes the result."""

import itertools
import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

_MOST_UNCLAIMED = 64  # results of one node that nobody has waited for
T = TypeVar("T")


class Unclaimed(Generic[T]):
    """Numbered, and safe in several threads."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asked: OrderedDict[int, tuple[str, T]] = OrderedDict()
        self._of_node: dict[str, deque[int]] = {}
        self._lock = threading.Lock()

    def put(self, node: str, asked: T) -> int:
        """A result that is not wanted, because nothing in the graph uses it, goes in the end."""
        with self._lock:
            number = next(self._numbers)
            self._asked[number] = node, asked
            mine = self._of_node.setdefault(node, deque())
            mine.append(number)
            if len(mine) > _MOST_UNCLAIMED:
                self._asked.pop(mine.popleft(), None)
        return number

    def take(self, number: int) -> T:
        """What got this number."""
        with self._lock:
            node, asked = self._asked.pop(number)
            self._of_node[node].remove(number)
        return asked
