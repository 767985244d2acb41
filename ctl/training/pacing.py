"""Number of steps of the next graph call."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ctl.metrics.protocol import RunEnd
from ctl.supervision.signals import Interruption


class Pacing(Protocol):
    """Lengths of graph calls. Synchronous and asynchronous workers have different ones.

    Attributes:
      has_other_processes: True if processes other than synchronous workers take part.
    """

    has_other_processes: bool

    def begin(self, interruption: Interruption, note: Callable[[Any], None]) -> None:
        """Prepares for a run."""

    def length(self, length: int, is_auto: bool, steps_per_sec: float, limits: Sequence[int]) -> int:
        """Returns the number of steps of the next graph call."""

    def end_of_short_loop(self, is_interrupted: bool) -> RunEnd:
        """Returns the reason of a graph call that ended early."""


class SynchronousPacing:
    """Graph calls of the same number of steps on all workers."""

    has_other_processes = False

    def begin(self, interruption: Interruption, note: Callable[[Any], None]) -> None:
        """No-op."""

    def length(self, length: int, is_auto: bool, steps_per_sec: float, limits: Sequence[int]) -> int:
        """Returns the smallest of `length` and the limits."""
        return min([length, *limits])

    def end_of_short_loop(self, is_interrupted: bool) -> RunEnd:
        """Returns the cause of a graph call with fewer steps than requested."""
        return RunEnd.DATA_ENDED
