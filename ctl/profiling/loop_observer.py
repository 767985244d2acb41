"""Base class of observers of the training loop.

class LongestStep(LoopObserver):
    def completed(self, loop):
        self.secs = max(self.secs, (loop.end - loop.start) / max(1, loop.num_steps))
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ctl.checkpoints.protocol import Manifest
from ctl.config import Config
from ctl.data.batches import Batches
from ctl.distribute.world import World
from ctl.metrics.group import WriterGroup
from ctl.step.step_times import StepTimes

NO_CONTEXT = contextlib.nullcontext(False)  # of graph calls that an observer does not slow down


@dataclass(frozen=True)
class CompletedLoop:
    """A graph call of the training loop that has ended.

    Attributes:
      step: Number of completed steps.
      num_steps: Number of steps of this call.
      start, end: Times of the clock (seconds).
      is_timed: False if the time includes compilation or a trace.
    """

    step: int
    num_steps: int
    start: float
    end: float
    is_timed: bool

    @property
    def secs(self) -> float | None:
        """Duration (seconds), or None if it is not representative."""
        return self.end - self.start if self.is_timed else None


@dataclass(frozen=True)
class ObserverInputs:
    """Objects from which an optional observer is created.

    Attributes:
      config: Settings of the run.
      world: Processes and devices of the job.
      timer: Times of the steps. None where steps cannot be timed.
      writers: Metric writers.
      log_dir: Directory of the event files, or "" without one.
      manifest: Returns the manifest of the state after a step; collective. The due actions are complete.
      run_no_step: Calls the traced graph for no step, which compiles it.
    """

    config: Config
    world: World
    timer: StepTimes | None
    writers: WriterGroup
    log_dir: str
    manifest: Callable[[int], Manifest]
    run_no_step: Callable[[], object]


class LoopObserver:
    """Observer of the graph calls of the training loop. Every default is a no-op."""

    def next_mark(self, step: int) -> int | None:
        """Returns a step at which the next graph call has to end, or None."""
        return None

    def around(self, step: int) -> contextlib.AbstractContextManager[bool]:
        """Returns a context for the graph call after `step`. It yields True if it slows the call down."""
        return NO_CONTEXT

    def completed(self, loop: CompletedLoop) -> None:
        """Called after each graph call."""

    def values_to_sum(self) -> Sequence[float]:
        """Returns values to sum over workers in the next vote, equally many on all workers."""
        return ()

    def take_sums(self, sums: Sequence[float]) -> None:
        """Called with the sums of `values_to_sum` over workers."""

    def wants_report(self) -> bool:
        """Returns True to request a call of `report`. Only the value of the chief is used."""
        return False

    def report(self, step: int, batches: Batches, *, has_more_steps: bool) -> None:
        """Called on all workers after the same step, if the observer of the chief wants a report."""

    def close(self) -> None:
        """Called after the last graph call, also after an error."""
