"""Rounds of steps between two synchronizations of asynchronous workers.

The training loop synchronizes the workers after each round, then logs, evaluates and saves.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ctl.metrics.protocol import Progressed, RunEnd
from ctl.supervision import heartbeat
from ctl.supervision.signals import Interruption

_ROUND_SECS = 2.0  # between synchronizations if no action is due earlier
_LOOPS_PER_ROUND = 4
_STALLED_SECS = 30.0
_log = logging.getLogger("ctl")


class RoundRunner(Protocol):
    """A loop that runs rounds."""

    num_workers: int

    def completed(self) -> int:
        """Returns the number of completed steps."""

    def watch_with(self, watch: Callable[[], bool]) -> None:
        """Sets a function that is polled while steps run. True ends the round."""

    def limit_calls(self, steps: int) -> None:
        """Sets the largest number of steps of a call of a worker."""


class RoundPacing:
    """Lengths of rounds.

    Args:
      loop: Loop that runs the rounds.
    """

    has_other_processes = True

    def __init__(self, loop: RoundRunner):
        self._loop = loop

    def begin(self, interruption: Interruption, note: Callable[[Any], None]) -> None:
        """Starts to watch the workers during rounds.

        Args:
          interruption: Received signals, which end a round early.
          note: Notifies the metric writers.
        """
        self._loop.watch_with(Watch(self._loop.completed, interruption, note))

    def length(self, length: int, is_auto: bool, steps_per_sec: float, limits: Sequence[int]) -> int:
        """Returns the number of steps of the next round.

        Args:
          length: Number of steps of a graph call.
          is_auto: True if `length` adapts to the duration of calls.
          steps_per_sec: Newest known speed, or 0.
          limits: Upper limits.
        """
        if is_auto:
            return min([length * _LOOPS_PER_ROUND, *limits])
        self._loop.limit_calls(length)
        return min([max(length * self._loop.num_workers, int(steps_per_sec * _ROUND_SECS)), *limits])

    def end_of_short_loop(self, is_interrupted: bool) -> RunEnd:
        """Returns the cause of a round with fewer steps. The data repeats, so it is not their end."""
        return RunEnd.SIGNAL if is_interrupted else RunEnd.STOPPED


class Watch:
    """Poll function of the chief during a round: reports progress, and warns if no step completes."""

    def __init__(
        self,
        completed: Callable[[], int],
        interruption: Interruption,
        note: Callable,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._completed, self._interruption, self._note, self._clock = completed, interruption, note, clock
        self._step, self._progressed, self._polled, self._has_warned = -1, 0.0, 0.0, False
        self.begin()

    def begin(self) -> None:
        """Starts a round."""
        self._progressed = self._polled = self._clock()

    def __call__(self) -> bool:
        """Returns True if a signal ends the round early."""
        time_secs = self._clock()
        if time_secs - self._polled >= 1.0:
            self._polled, step = time_secs, self._completed()
            if step != self._step:
                self._step, self._progressed, self._has_warned = step, time_secs, False
                self._note(Progressed(step))
                heartbeat.current.record_step(step)
            elif time_secs - self._progressed > _STALLED_SECS and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "No worker has completed a step for %.0f s, since step %d; still waiting. A lost "
                    "worker may be started again at its address.",
                    time_secs - self._progressed,
                    step,
                )
        return self._interruption.received is not None
