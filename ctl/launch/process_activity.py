"""Processor time of a process tree, which confirms a suspected hang.

table = ActivityTable()
table.measure({"job_0.log": False}, now_secs, group.cpu_ticks)
table.idle_secs("job_0.log", now_secs)
"""

import math
import os
from collections.abc import Callable, Mapping

_IDLE_SHARE = 0.03  # of one processor: threads of TensorFlow that wait use less
_WINDOW_SECS = 1.0


class ProcessActivity:
    """Samples of one process tree.

    Attributes:
      is_measured: False while the processor time is unknown, as on another machine.
    """

    def __init__(self) -> None:
        self.is_measured = False
        self._ticks = -1
        self._changed_secs = 0.0
        self._window: tuple[float, int] = (0.0, 0)  # its start, and the ticks until then
        self._active_secs = 0.0

    def sample(self, now_secs: float, ticks: int | None, *, is_stopped: bool) -> None:
        """Adds a sample.

        Args:
          now_secs: Current time (seconds).
          ticks: Processor time of the tree (clock ticks), None if unknown.
          is_stopped: True if the kernel has stopped the process. The time of its children does not count.
        """
        if ticks is None:
            return
        if not self.is_measured:
            self.is_measured, self._ticks, self._window = True, ticks, (now_secs, ticks)
            self._changed_secs = self._active_secs = now_secs
            return
        if ticks != self._ticks:
            self._ticks, self._changed_secs = ticks, now_secs
        start_secs, start_ticks = self._window
        if now_secs - start_secs >= _WINDOW_SECS:
            used_secs = (ticks - start_ticks) / os.sysconf("SC_CLK_TCK")
            if used_secs / (now_secs - start_secs) > _IDLE_SHARE and not is_stopped:
                self._active_secs = now_secs
            self._window = (now_secs, ticks)

    def idle_secs(self, now_secs: float) -> float:
        """Returns the seconds since the tree used a noticeable share of a processor.

        Infinite if the processor time is unknown.
        """
        return now_secs - self._active_secs if self.is_measured else math.inf

    def unchanged_secs(self, now_secs: float) -> float:
        """Returns the seconds without a single clock tick."""
        return now_secs - self._changed_secs


class ActivityTable:
    """Activity of the processes that are suspected to hang, by the name of the log."""

    def __init__(self) -> None:
        self._activity: dict[str, ProcessActivity] = {}

    def measure(
        self, suspects: Mapping[str, bool], now_secs: float, cpu_ticks: Callable[[], Mapping[str, int]]
    ) -> None:
        """Samples the processor time of the suspects. Discards that of the other processes.

        Args:
          suspects: Name of the log -> True for a process that the kernel has stopped.
          now_secs: Current time (seconds).
          cpu_ticks: Returns the processor time of each process tree of this machine.
        """
        ticks = cpu_ticks() if suspects else {}
        self._activity = {name: self._activity.get(name) or ProcessActivity() for name in suspects}
        for name, is_stopped in suspects.items():
            self._activity[name].sample(now_secs, ticks.get(name), is_stopped=is_stopped)

    def get(self, name: str) -> ProcessActivity | None:
        """Returns the activity of a suspect."""
        return self._activity.get(name)

    def idle_secs(self, name: str, now_secs: float) -> float:
        """Returns the seconds without processor time, infinite if it cannot be measured."""
        activity = self._activity.get(name)
        return activity.idle_secs(now_secs) if activity else 0.0

    def forget(self, name: str) -> None:
        """Discards the samples of a process that is started again."""
        self._activity.pop(name, None)

    def clear(self) -> None:
        """Discards all samples."""
        self._activity.clear()
