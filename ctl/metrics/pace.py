"""How fast training goes and when it will be over."""

from collections.abc import Callable

_SECS_BETWEEN_TICKS = 0.1


class Pace:
    """Counts from the step a run started at; the clock gives seconds.

    The first loop also traces and compiles, so once a second one is known the first is left out.
    """

    def __init__(
        self, clock: Callable[[], float], start_step: int = 0, total_steps: int | None = None
    ) -> None:
        self.total_steps = total_steps
        self.step = start_step
        self._clock = clock
        self._start = self._now = (start_step, clock())
        self._first: tuple[int, float] | None = None
        self._next_tick = float("-inf")

    def tick(self, step: int) -> bool:
        """Notes the step; True if the display is due, at most every 0.1 s. Costs nearly nothing."""
        self.step = step
        now = self._clock()
        if now < self._next_tick:
            return False
        self._next_tick = now + _SECS_BETWEEN_TICKS
        self._now = (step, now)
        if self._first is None:
            self._first = self._now
        return True

    @property
    def elapsed_secs(self) -> float:
        """Seconds from the start to the newest tick."""
        return self._now[1] - self._start[1]

    @property
    def steps_per_sec(self) -> float | None:
        """Since the first loop, everything included; None while unknown."""
        for step, since in (self._first or self._start, self._start):
            if self._now[0] > step and self._now[1] > since:
                return (self._now[0] - step) / (self._now[1] - since)
        return None

    @property
    def eta_secs(self) -> float | None:
        """Seconds until `total_steps`; None while unknown."""
        rate = self.steps_per_sec
        if rate is None or self.total_steps is None:
            return None
        return max(0, self.total_steps - self.step) / rate
