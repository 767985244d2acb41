"""Speed of training and estimated time of its end."""

from collections.abc import Callable

_SECS_BETWEEN_REDRAWS = 0.1


class Pace:
    """Speed of a run, without loops that compile.

    The first loop, the loops of `exclude_loop` and the first evaluation are excluded.

    Args:
      clock: Function that returns the time (seconds).
      start_step: Number of completed steps at the start of the run.
      total_steps: Number of steps at the end of the run. None: unknown.

    Attributes:
      step: Number of completed steps at the newest tick.
      total_steps: As passed.
    """

    def __init__(
        self, clock: Callable[[], float], start_step: int = 0, total_steps: int | None = None
    ) -> None:
        self.total_steps = total_steps
        self.step = start_step
        self._clock = clock
        self._start_time = self._newest_time = clock()
        self._counted_steps, self._counted_secs = 0, 0.0
        self._is_excluded = True
        self._has_evaluated = False
        self._next_redraw = float("-inf")

    def tick(self, step: int) -> bool:
        """Stores the step, and returns True if the display is to be redrawn: at most every 0.1 seconds."""
        time = self._clock()
        if not self._is_excluded:
            self._counted_steps += max(0, step - self.step)
            self._counted_secs += time - self._newest_time
        elif step > self.step:
            self._is_excluded = False
        self.step, self._newest_time = step, time
        if time < self._next_redraw:
            return False
        self._next_redraw = time + _SECS_BETWEEN_REDRAWS
        return True

    def exclude_loop(self) -> None:
        """Excludes the loop before the next tick, because it has compiled."""
        self._is_excluded = True

    def note_evaluation(self) -> None:
        """Excludes the time of the first evaluation. Called after each evaluation."""
        if not self._has_evaluated:
            self._has_evaluated, self._newest_time = True, self._clock()

    @property
    def elapsed_secs(self) -> float:
        """Seconds from the start to the newest tick, including compilation."""
        return self._newest_time - self._start_time

    @property
    def steps_per_sec(self) -> float | None:
        """Steps per second, including evaluations and saves between loops. None: unknown."""
        if self._counted_steps <= 0 or self._counted_secs <= 0:
            return None
        return self._counted_steps / self._counted_secs

    @property
    def eta_secs(self) -> float | None:
        """Seconds until `total_steps`. None: unknown."""
        if self.total_steps is None:
            return None
        remaining_steps, rate = max(0, self.total_steps - self.step), self.steps_per_sec
        if not remaining_steps:
            return 0.0
        return None if rate is None else remaining_steps / rate
