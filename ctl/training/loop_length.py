"""How many steps one graph call takes, and what the steps of an interval add up to."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from ctl.step import keras_metrics
from ctl.step.averaging import Totals

_TARGET_SECS = 0.5  # of one loop: long enough to hide Python, short enough to stop soon
_MAX_GROWTH = 8


class LoopLength:
    """Chooses the length of loops, in steps; "auto" aims at half a second.

    `length` holds until it is set to `proposed`: workers in step must change it at the same step,
    to the chief's proposal.

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
        """Learns from a loop that ran; the first one, which compiles, is not to be told."""
        if self.auto and steps >= 1:
            fitting = int(_TARGET_SECS * steps / max(secs, 1e-9))
            self.proposed = max(1, min(fitting, self.length * _MAX_GROWTH))


class Interval:
    """Totals and time of the steps since numbers were last reported.

    Part of the totals is still on the device (`packed`), part was fetched before (`_fetched`), for
    a save or by the attempt that was resumed.
    """

    def __init__(self, totals: Totals):
        self._totals = totals
        self._fetched: np.ndarray | None = None
        self._names: tuple[str, ...] = ()
        self.packed: Any = totals.zeros()
        self.steps = 0
        self.secs = 0.0  # training alone: no compilation, writers, evaluation, saving
        self.timed_steps = 0
        self.arrays: dict[str, np.ndarray] = {}  # metrics of rank >= 1, read with the newest `means`

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
        """Takes the totals off the device; `summed` adds a vector up over workers."""
        here = self._totals.broadcast(self.packed)
        here = np.asarray(summed(here.ravel())).reshape(here.shape)
        if self._fetched is not None and self._names == self._totals.names:
            here = here + self._fetched
        self._fetched, self._names = here, self._totals.names
        self.packed = self._totals.zeros()

    def means(self) -> dict[str, float]:
        """Means over the interval, after `fetch`; on all workers alike, as metrics are summed."""
        means = self._totals.means(self._fetched) if self._fetched is not None else {}
        numbers, self.arrays = keras_metrics.metric_results(self._totals.metrics)
        return means | numbers

    def sums(self) -> np.ndarray | None:
        """What was fetched so far, to be handed to `means_since`."""
        return self._fetched

    def means_since(self, before: np.ndarray | None) -> dict[str, float]:
        """Means over what came after `before = sums()`, after `fetch`; metrics over the interval."""
        if self._fetched is None:
            return {}
        means = self._totals.means(self._fetched if before is None else self._fetched - before)
        return means | keras_metrics.metric_results(self._totals.metrics)[0]

    def num_examples(self) -> float:
        """Examples that were seen, after `fetch`."""
        return 0.0 if self._fetched is None else self._totals.num_rows(self._fetched)

    def has_full_batches(self) -> bool:
        """Whether some replica had its share of a full batch, after `fetch`."""
        return self._fetched is not None and self._totals.num_full(self._fetched) > 0

    def steps_per_sec(self) -> float | None:
        """None while nothing was timed."""
        return self.timed_steps / self.secs if self.secs > 0 else None

    def clear(self) -> None:
        """Starts the next interval."""
        keras_metrics.reset(self._totals.metrics.values())
        self._fetched = None
        self.packed = self._totals.zeros()
        self.steps = self.timed_steps = 0
        self.secs = 0.0

    def state(self) -> dict:
        """JSON-able, after `fetch`; for the manifest."""
        if self._fetched is None:
            return {}
        return {"names": list(self._names), "totals": self._fetched.tolist(), "steps": self.steps}

    def restore(self, state: Mapping) -> None:
        """Goes on where `state` was taken."""
        if state:
            self._names = tuple(state["names"])
            self._fetched = np.asarray(state["totals"], np.float64).reshape(-1, 2)
            self.steps = int(state["steps"])
