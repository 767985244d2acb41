"""Observers of the training loop that every run has, and the group of all observers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ctl.data.batches import Batches
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Progressed
from ctl.profiling.loop_observer import CompletedLoop, LoopObserver
from ctl.supervision import heartbeat


class LeaseObserver(LoopObserver):
    """Ends a run if another job has taken over its model directory."""

    def __init__(self, check_lease: Callable[[], None]):
        self._check_lease = check_lease

    def completed(self, loop: CompletedLoop) -> None:
        """Raises an error if another job has taken over the model directory."""
        self._check_lease()


class ProgressObserver(LoopObserver):
    """Notifies the metric writers of the number of completed steps."""

    def __init__(self, writers: WriterGroup):
        self._writers = writers

    def completed(self, loop: CompletedLoop) -> None:
        """Notifies the writers."""
        self._writers.note(Progressed(loop.step))


class HeartbeatObserver(LoopObserver):
    """Records progress for the detection of hanging processes."""

    def completed(self, loop: CompletedLoop) -> None:
        """Records the step."""
        heartbeat.current.record_step(loop.step)


class ObserverGroup:
    """The observers of a loop, called in the given order."""

    def __init__(self, observers: Sequence[LoopObserver] = ()):
        self._observers = list(observers)

    def next_mark(self, step: int) -> int | None:
        """Returns the first step at which the next graph call has to end, or None."""
        marks = [mark for o in self._observers if (mark := o.next_mark(step)) is not None]
        return min(marks, default=None)

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[bool]:
        """Enters the contexts of all observers. Yields True if one of them slows the graph call down."""
        with contextlib.ExitStack() as stack:
            slowed = [stack.enter_context(o.around(step)) for o in self._observers]
            yield any(slowed)

    def completed(self, loop: CompletedLoop) -> None:
        """Notifies all observers of a graph call."""
        for observer in self._observers:
            observer.completed(loop)

    def sum_over_workers(self, values: Sequence[float], sum_values: Callable[[Any], Any]) -> list[float]:
        """Sums `values` over workers, together with the values of the observers.

        Args:
          values: Values of this worker.
          sum_values: Sums a vector over workers.

        Returns:
          The sums of `values`.
        """
        parts = [list(o.values_to_sum()) for o in self._observers]
        extra = [value for part in parts for value in part]
        sums = list(sum_values([*values, *extra] if extra else values))
        start = len(values)
        for observer, part in zip(self._observers, parts, strict=True):
            if part:
                observer.take_sums(sums[start : start + len(part)])
            start += len(part)
        return sums[: len(values)]

    def wants_report(self) -> bool:
        """Returns True if an observer wants a report."""
        return any(o.wants_report() for o in self._observers)

    def report(self, step: int, batches: Batches, *, has_more_steps: bool) -> None:
        """Calls `report` of all observers."""
        for observer in self._observers:
            observer.report(step, batches, has_more_steps=has_more_steps)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes all observers at the end of the block."""
        try:
            yield
        finally:
            for observer in self._observers:
                observer.close()
