"""Observers of the training loop that every run has, and the group of all observers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ctl.data.batches import Batches
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Progressed
from ctl.profiling.loop_observer import NO_CONTEXT, CompletedLoop, LoopObserver
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


@contextlib.contextmanager
def _all_of(contexts: Sequence[contextlib.AbstractContextManager[bool]]) -> Iterator[bool]:
    """Enters all contexts. Yields True if one of them yields True."""
    with contextlib.ExitStack() as stack:
        slowed = [stack.enter_context(context) for context in contexts]
        yield any(slowed)


class ObserverGroup:
    """The observers of a loop, called in the given order."""

    def __init__(self, observers: Sequence[LoopObserver] = ()):
        self._observers = list(observers)
        # With one step per graph call, a call of a default method for each observer would be noticeable.
        default = LoopObserver
        self._with_marks = [o for o in observers if type(o).next_mark is not default.next_mark]
        self._with_contexts = [o for o in observers if type(o).around is not default.around]
        self._notified = [o for o in observers if type(o).completed is not default.completed]
        self._with_reports = [o for o in observers if type(o).wants_report is not default.wants_report]

    def next_mark(self, step: int) -> int | None:
        """Returns the first step at which the next graph call has to end, or None."""
        marks = [mark for o in self._with_marks if (mark := o.next_mark(step)) is not None]
        return min(marks) if marks else None

    def around(self, step: int) -> contextlib.AbstractContextManager[bool]:
        """Returns a context of all observers. It yields True if one of them slows the graph call down."""
        contexts = [o.around(step) for o in self._with_contexts]
        contexts = [context for context in contexts if context is not NO_CONTEXT]
        return _all_of(contexts) if contexts else NO_CONTEXT

    def completed(self, loop: CompletedLoop) -> None:
        """Notifies all observers of a graph call."""
        for observer in self._notified:
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
        return any(o.wants_report() for o in self._with_reports)

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
