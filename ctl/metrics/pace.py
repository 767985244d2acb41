"""How fast training goes and when it will be over."""

from collections.abc import Callable

_SECS_BETWEEN_DRAWINGS = 0.1


class Pace:
    """Counts from the step a run started at; the clock gives seconds.

    What compiles never counts: the first loop, those that `leave_out` announces, and the first evaluation.
    """

    def __init__(
        self, clock: Callable[[], float], start_step: int = 0, total_steps: int | None = None
    ) -> None:
        self.total_steps = total_steps
        self.step = start_step
        self._clock = clock
        self._started = self._newest = clock()
        self._counted_steps, self._counted_secs = 0, 0.0
        self._leave_out = True
        self._has_evaluated = False
        self._next_drawing = float("-inf")

    def tick(self, step: int) -> bool:
        """Notes the step; True if the display is due, at most every 0.1 s. Costs nearly nothing."""
        now = self._clock()
        if not self._leave_out:
            self._counted_steps += max(0, step - self.step)
            self._counted_secs += now - self._newest
        elif step > self.step:
            self._leave_out = False
        self.step, self._newest = step, now
        if now < self._next_drawing:
            return False
        self._next_drawing = now + _SECS_BETWEEN_DRAWINGS
        return True

    def leave_out(self) -> None:
        """The loop before the next tick compiled."""
        self._leave_out = True

    def evaluated(self) -> None:
        """An evaluation has ended."""
        if not self._has_evaluated:
            self._has_evaluated, self._newest = True, self._clock()

    @property
    def elapsed_secs(self) -> float:
        """Seconds from the start to the newest tick, compilation included."""
        return self._newest - self._started

    @property
    def steps_per_sec(self) -> float | None:
        """Over the loops that count, evaluation and saving between them included; None while unknown."""
        if self._counted_steps <= 0 or self._counted_secs <= 0:
            return None
        return self._counted_steps / self._counted_secs

    @property
    def eta_secs(self) -> float | None:
        """Seconds until `total_steps`; 0 at the end, None while unknown."""
        if self.total_steps is None:
            return None
        left, rate = max(0, self.total_steps - self.step), self.steps_per_sec
        if not left:
            return 0.0
        return None if rate is None else left / rate
