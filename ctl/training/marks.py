"""Steps after which actions are due."""

from ctl.callbacks.schedule import Action, Every, Intervals

_EPOCH = Every(epochs=1)


class Marks:
    """Steps after which actions are due by steps or epochs.

    Args:
      intervals: Intervals of the trainer.
      has_epoch_events: True if a callback is called after each epoch.
    """

    def __init__(self, intervals: Intervals, has_epoch_events: bool = False):
        self.intervals = intervals
        self._has_epoch_events = has_epoch_events

    def due(self, step: int, steps_per_epoch: float | None) -> Action:
        """Returns the actions that are due after `step`."""
        due = self.intervals.due(step, steps_per_epoch)
        ends_epoch = self._has_epoch_events and _EPOCH.is_mark(step, steps_per_epoch)
        return due | Action.END_EPOCH if ends_epoch else due

    def next_mark(self, step: int, steps_per_epoch: float | None) -> int | None:
        """Returns the first step after `step` with a pending action, or None."""
        marks = [self.intervals.next_mark(step, steps_per_epoch)]
        if self._has_epoch_events:
            marks.append(_EPOCH.next_mark(step, steps_per_epoch))
        return min((mark for mark in marks if mark is not None), default=None)
