"""Length of graph calls, and totals of the steps since the newest log."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from ctl.step import keras_metrics
from ctl.step.averaging import Totals

_TARGET_SECS = 0.5  # of one loop: long enough to hide Python, short enough to stop soon
_MAX_GROWTH = 8


class LoopLength:
    """Number of steps of graph calls. "auto" aims at half a second.

    `length` is in effect until all workers adopt the chief's `proposed` length at the same step.

    >>> length = LoopLength("auto")
    >>> length.took(steps=1, secs=0.01); length.length, length.proposed
    (1, 8)
    """

    def __init__(self, steps_per_loop: int | str):
        self.auto = steps_per_loop == "auto"
        self.length = self.proposed = 1 if self.auto else int(steps_per_loop)

    def adopt(self, length: int) -> None:
        """Sets the length of the next loop, on which workers have agreed."""
        self.length = length

    def took(self, *, steps: int, secs: float) -> None:
        """Adapts the proposed length to the duration (seconds) of a graph call that did not compile."""
        if self.auto and steps >= 1:
            fitting = int(_TARGET_SECS * steps / max(secs, 1e-9))
            self.proposed = max(1, min(fitting, self.length * _MAX_GROWTH))


class Interval:
    """Totals and durations of the steps since the newest log.

    A part of the totals is on the device (`packed`). Another part was fetched before (`_fetched`), for a
    save or before a restart.

    Attributes:
      packed: Totals on the device, `[m, 2]` float64.
      steps: Number of steps.
      timed_steps, secs: Number of timed steps, and their duration (seconds) without compilation, writers,
        evaluation and saving.
      arrays: Results of metrics of rank 1 or more, read with the newest `means`.
    """

    def __init__(self, totals: Totals):
        self._totals = totals
        self._fetched: np.ndarray | None = None
        self._names: tuple[str, ...] = ()
        self.packed: Any = totals.zeros()
        self.steps = 0
        self.secs = 0.0
        self.timed_steps = 0
        self.arrays: dict[str, np.ndarray] = {}

    def begin_steps(self) -> None:
        """Resets the metrics before the first step of an interval, as a callback may have used them."""
        if not self.steps:
            keras_metrics.reset(self._totals.metrics.values())

    def add(self, packed: Any, steps: int, secs: float | None) -> None:
        """Adds a graph call: totals on the device, number of steps, and seconds if they are timed."""
        self.packed = packed
        self.steps += steps
        if secs is not None:
            self.timed_steps += steps
            self.secs += secs

    def fetch(self, summed: Any) -> None:
        """Reads the totals from the device and sums them over workers with `summed`."""
        totals = self._totals.broadcast(self.packed)
        totals = np.asarray(summed(totals.ravel())).reshape(totals.shape)
        if self._fetched is not None and self._names == self._totals.names:
            totals = totals + self._fetched
        self._fetched, self._names = totals, self._totals.names
        self.packed = self._totals.zeros()

    def means(self) -> dict[str, float]:
        """Returns means over the interval, after `fetch`. All workers call it, since metrics are summed."""
        means = self._totals.means(self._fetched) if self._fetched is not None else {}
        numbers, self.arrays = keras_metrics.metric_results(self._totals.metrics)
        return means | numbers

    def sums(self) -> np.ndarray | None:
        """Returns the fetched totals, an argument of `means_since`."""
        return self._fetched

    def means_since(self, before: np.ndarray | None) -> dict[str, float]:
        """Returns means of the steps since `before = sums()`, after `fetch`, and current metrics."""
        assert self._fetched is not None
        means = self._totals.means(self._fetched if before is None else self._fetched - before)
        return means | keras_metrics.metric_results(self._totals.metrics)[0]

    def num_examples(self) -> float:
        """Returns the number of examples, after `fetch`."""
        return 0.0 if self._fetched is None else self._totals.num_rows(self._fetched)

    def has_full_batches(self) -> bool:
        """Returns True if a replica had its share of a full batch, after `fetch`."""
        return self._fetched is not None and self._totals.num_full(self._fetched) > 0

    def steps_per_sec(self) -> float | None:
        """Returns the rate of the timed steps, or None if no step was timed."""
        return self.timed_steps / self.secs if self.secs > 0 else None

    def clear(self) -> None:
        """Starts the next interval."""
        keras_metrics.reset(self._totals.metrics.values())
        self._fetched = None
        self.packed = self._totals.zeros()
        self.steps = self.timed_steps = 0
        self.secs = 0.0

    def state(self) -> dict:
        """Returns a JSON object for the manifest, after `fetch`."""
        if self._fetched is None:
            return {}
        return {"names": list(self._names), "totals": self._fetched.tolist(), "steps": self.steps}

    def restore(self, state: Mapping) -> None:
        """Restores a result of `state`."""
        if state:
            self._names = tuple(state["names"])
            self._fetched = np.asarray(state["totals"], np.float64).reshape(-1, 2)
            self.steps = int(state["steps"])
