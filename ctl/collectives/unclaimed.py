"""Storage of pending collectives between the graph node that requests them and the node that takes them."""

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

_MAX_UNCLAIMED = 64  # values per node
T = TypeVar("T")


class Unclaimed(Generic[T]):
    """Thread-safe storage of pending collectives by number.

    Args:
      discard: Called with each dropped value.
    """

    def __init__(self, discard: Callable[[T], None]) -> None:
        self._discard = discard
        self._numbers = itertools.count(1)
        self._value_by_number: OrderedDict[int, tuple[str, T]] = OrderedDict()
        self._numbers_by_node: dict[str, deque[int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._value_by_number)

    def put(self, node: str, value: T) -> int:
        """Stores a value and returns its number.

        If a node has more than `_MAX_UNCLAIMED` values, its oldest value is dropped.
        """
        dropped = None
        with self._lock:
            number = next(self._numbers)
            self._value_by_number[number] = node, value
            numbers = self._numbers_by_node.setdefault(node, deque())
            numbers.append(number)
            if len(numbers) > _MAX_UNCLAIMED:
                dropped = self._value_by_number.pop(numbers.popleft(), None)
        if dropped is not None:
            self._discard(dropped[1])
        return number

    def take(self, number: int) -> T:
        """Removes and returns the value of a number."""
        with self._lock:
            node, value = self._value_by_number.pop(number)
            self._numbers_by_node[node].remove(number)
        return value
