"""Intervals of actions in steps, seconds or epochs.

    Every(steps=100)          at steps 100, 200, ...
    Every(epochs=1)           at the first step that completes an epoch
    Every(secs=600)           every ten minutes by the clock of the chief
    Every()                   never (also steps=0, secs=0, epochs=0)

A mark is a step with a due action. Marks by steps and epochs depend only on the step, so a resumed
run has the same marks as an uninterrupted run. The time is an argument.
"""

import enum
import functools
import math
import numbers
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ctl.errors import UsageError


class Action(enum.Flag):
    """Actions of the training loop after a graph call; a set of them is `Action.LOG | Action.SAVE`."""

    LOG = enum.auto()
    EVALUATE = enum.auto()
    SAVE = enum.auto()
    END_EPOCH = enum.auto()  # notifies the callbacks
    PROFILE = enum.auto()
    WITHOUT_CALLBACKS = enum.auto()  # added to EVALUATE: does not notify the callbacks


NO_ACTION = Action(0)


def combined(actions: Iterable[Action]) -> Action:
    """Returns the set of all `actions`."""
    return functools.reduce(operator.or_, actions, NO_ACTION)


@dataclass(frozen=True, kw_only=True)
class Every:
    """An interval in one unit. `Every()` means never.

    Attributes:
      steps: Number of steps, or 0.
      secs: Time (seconds), or 0.
      epochs: Number of epochs, possibly fractional, or 0.

    Raises:
      UsageError: A value is negative, infinite or no number, or more than one value is given.
    """

    steps: int = 0
    secs: float = 0.0
    epochs: float = 0.0

    def __post_init__(self) -> None:
        intervals = {k: v for k, v in vars(self).items() if v}
        no_numbers = {k: v for k, v in vars(self).items() if not isinstance(v, numbers.Real)}
        if no_numbers:
            raise UsageError(f"Every got {no_numbers}; expected numbers, e.g. Every(steps=100).")
        if len(intervals) > 1:
            raise UsageError(
                f"Every got {intervals}; expected one unit. Write Every(steps=...), Every(secs=...) "
                "or Every(epochs=...)."
            )
        invalid = {k: v for k, v in intervals.items() if not v > 0 or math.isinf(v)}
        if invalid or not float(self.steps).is_integer():
            raise UsageError(
                f"Every got {intervals}; expected a positive number (steps: a whole one), or 0 for never."
            )

    def next_mark(self, step: int, steps_per_epoch: float | None = None) -> int | None:
        """Returns the first mark after `step`.

        Args:
          step: Number of completed steps.
          steps_per_epoch: Number of steps. Infinity: not counted yet. None: the data have no epochs.

        Returns:
          A step, or None for an interval in seconds, an unknown length of the data, or never.

        Raises:
          UsageError: The interval is in epochs, and the data have none, or a part of an unknown length.
        """
        if self.steps:
            return (step // int(self.steps) + 1) * int(self.steps)
        if self.epochs:
            if not steps_per_epoch:
                raise UsageError(
                    "Every(epochs=...), or after_epoch, requires finite train_data, and does not support "
                    "train_data_fn. Write Every(steps=...), or return a finite dataset or "
                    "ctl.from_arrays(...)."
                )
            if math.isinf(steps_per_epoch):  # not counted before the first epoch has ended
                if float(self.epochs).is_integer():
                    return None
                raise UsageError(
                    f"Every(epochs={self.epochs}) requires training data of known length. Write whole "
                    "epochs, or return "
                    "dataset.apply(tf.data.experimental.assert_cardinality(n)) with n batches."
                )
            period = self.epochs * steps_per_epoch
            count = math.floor(step / period + 1e-9) + 1
            return max(step + 1, math.ceil(count * period - 1e-9))
        return None

    def is_mark(self, step: int, steps_per_epoch: float | None = None) -> bool:
        """Returns True if `step` is a mark by steps or epochs.

        Args:
          step: Number of completed steps.
          steps_per_epoch: Number of steps. Infinity: not counted yet. None: the data have no epochs.
        """
        return step > 0 and self.next_mark(step - 1, steps_per_epoch) == step


@dataclass(frozen=True)
class EpochLength:
    """Length of the epochs of a run.

    Attributes:
      steps: Number of steps per epoch, possibly fractional.
      first: Number of epochs before step 0.
    """

    steps: float
    first: int = 0

    def epoch_of(self, step: int) -> int:
        """Returns the number of the epoch of the newest of `step` completed steps, counted from 1.

        A step with examples of two epochs belongs to the first one, which it completes.
        """
        return self.first + max(1, math.floor((step - 1) / self.steps + 1e-9) + 1)


AT_THE_END = Every(steps=2**62)  # a mark that no run reaches


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Intervals of the actions of the training loop, and the length of a graph call.

    Attributes:
      steps_per_loop: Number of steps in one graph call, or "auto" for calls of 0.2 to 1 seconds. A call
        ends at the next mark, so that metrics do not depend on this number.
      log: Interval at which metric writers receive the means since the last log.
      evaluate: Interval of evaluations of all `eval_data`.
      save: Interval of checkpoints. Checkpoints are also saved before each evaluation and at the end of a
        run.
    """

    steps_per_loop: int | str = "auto"
    log: Every = field(default_factory=lambda: Every(steps=100))
    evaluate: Every = field(default_factory=Every)
    save: Every = field(default_factory=lambda: Every(steps=500))

    def __post_init__(self) -> None:
        k = self.steps_per_loop
        is_whole = isinstance(k, numbers.Integral) and not isinstance(k, bool)
        if k != "auto" and not (is_whole and int(k) >= 1):
            raise UsageError(f"steps_per_loop is {k!r}; expected a whole number of steps >= 1, or 'auto'.")
        for name, every in {"log": self.log, "evaluate": self.evaluate, "save": self.save}.items():
            if not isinstance(every, Every):
                raise UsageError(
                    f"Intervals({name}={every!r}): expected an Every, "
                    f"e.g. Intervals({name}=ctl.Every(steps=100))."
                )

    def epoch_length(self, steps_per_epoch: float | None) -> EpochLength | None:
        """Returns the length of an epoch for metric writers, or None if it is unknown.

        Args:
          steps_per_epoch: Number of steps in one pass over the data, as in `Every.next_mark`.
        """
        return EpochLength(steps_per_epoch) if steps_per_epoch and math.isfinite(steps_per_epoch) else None

    @property
    def by_action(self) -> Mapping[Action, Every]:
        """The interval of each action."""
        return {Action.LOG: self.log, Action.EVALUATE: self.evaluate, Action.SAVE: self.save}

    def next_mark(self, step: int, steps_per_epoch: float | None = None) -> int | None:
        """Returns the first step after `step` at which an action is due by steps or epochs.

        Args:
          step: Number of completed steps.
          steps_per_epoch: Number of steps. Infinity: not counted yet. None: the data have no epochs.
        """
        marks = [every.next_mark(step, steps_per_epoch) for every in self.by_action.values()]
        return min((mark for mark in marks if mark is not None), default=None)

    def due(self, step: int, steps_per_epoch: float | None = None) -> Action:
        """Returns the actions that are due at `step` by steps or epochs.

        Args:
          step: Number of completed steps.
          steps_per_epoch: Number of steps. Infinity: not counted yet. None: the data have no epochs.
        """
        return combined(a for a, every in self.by_action.items() if every.is_mark(step, steps_per_epoch))


class Timers:
    """Timers of the intervals in seconds, by the clock of one process.

    >>> timers = Timers(Intervals(save=Every(secs=600)), time_secs=0.0)
    >>> timers.due(time_secs=601.0) == Action.SAVE
    True
    >>> timers.due(time_secs=602.0) == NO_ACTION
    True
    """

    def __init__(self, intervals: Intervals, time_secs: float):
        self._secs = {action: every.secs for action, every in intervals.by_action.items() if every.secs}
        self._last = dict.fromkeys(self._secs, time_secs)

    def __bool__(self) -> bool:
        return bool(self._secs)

    def due(self, time_secs: float) -> Action:
        """Returns the actions for which the interval has passed, and restarts their timers."""
        expired = [action for action, secs in self._secs.items() if time_secs - self._last[action] >= secs]
        self._last |= dict.fromkeys(expired, time_secs)
        return combined(expired) if expired else NO_ACTION
