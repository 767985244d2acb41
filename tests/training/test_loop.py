"""Reasons for the end of a loop. Both workers agree if only one of them has a reason."""

from signal import SIGINT, SIGTERM

import numpy as np
import pytest
from ctl.callbacks.schedule import Action, Every, Intervals
from ctl.data.batches import Batches
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import RunEnd
from ctl.step.averaging import Totals
from ctl.step.reducers.sum import SumReducer
from ctl.supervision.signals import Interruption
from ctl.training.loop import TrainLoop, Vote
from ctl.training.marks import Marks
from ctl.training.pacing import SynchronousPacing


class Steps:
    """A step program that does not compute."""

    totals, reducer, has_run = Totals(), SumReducer(), True

    def run(self, batches, steps, packed):
        return packed, steps

    def pacing(self):
        return SynchronousPacing()

    def refresh(self):
        pass


class Agreement:
    """Collectives with another worker; calls `after_sum` after the votes are added."""

    num_workers = 2

    def __init__(self, other_votes, after_sum):
        self.other_votes, self.after_sum = other_votes, after_sum

    def sum(self, values):
        assert isinstance(values, Vote)
        other_vote = Vote(**dict(zip(("stop", "sigterm", "interrupt"), self.other_votes, strict=True)))
        self.after_sum()
        return np.add(values, other_vote)


def end_of_loop(signals, other_votes, after_sum=lambda: None):
    """Returns the reason for the end of the loop and the last step."""
    batches = Batches(object(), None, False, None, "skip", "")
    train_loop = TrainLoop(
        Steps(), batches, Marks(Intervals(steps_per_loop=1, log=Every(), save=Every())),
        Agreement(other_votes, after_sum),
        is_chief=True, writers=WriterGroup([]),
    )  # fmt: skip
    *_, last = train_loop.loops(0, 100, signals)
    return last.end, last.step


def test_a_signal_after_workers_have_agreed_to_stop_has_no_effect():
    """The other worker has no signal and continues with the last evaluation."""
    signals = Interruption()
    end = end_of_loop(signals, [1, 0, 0], after_sum=lambda: signals._handle(SIGTERM, None))
    assert end == (RunEnd.STOPPED, 1) and signals.received == SIGTERM


@pytest.mark.parametrize(
    ("local_signal", "other_votes", "expected"),
    [
        (None, [0, 1, 0], SIGTERM), (None, [0, 0, 1], SIGINT), (SIGINT, [0, 0, 1], SIGINT),
        (SIGINT, [0, 1, 0], SIGTERM), (SIGTERM, [1, 0, 1], SIGTERM),
    ],
)  # fmt: skip
def test_a_signal_to_any_worker_is_one_to_all_and_sigterm_comes_first(local_signal, other_votes, expected):
    signals = Interruption()
    if local_signal:
        signals._handle(local_signal, None)
    assert end_of_loop(signals, other_votes) == (RunEnd.SIGNAL, 1)
    assert signals.received == expected


def test_the_chief_s_clock_and_length_hold_on_all_workers():
    """A worker that is not the chief leaves these fields at 0 and uses the sums."""
    chief_vote = Vote(length=7, wait=3, save=1)
    assert chief_vote.due == Action.SAVE
    train_loop = TrainLoop(
        Steps(), Batches(object(), None, False, None, "skip", ""),
        Marks(Intervals(steps_per_loop="auto", log=Every(), save=Every())), Chief(chief_vote),
        is_chief=False, writers=WriterGroup([]),
    )  # fmt: skip
    loops = train_loop.loops(0, 100, Interruption())
    first, second = (loop for loop, _ in zip(loops, range(2), strict=False))
    assert (first.step, first.due) == (1, Action.SAVE) and second.step == 8


class Chief:
    """Collectives with another worker, the chief."""

    num_workers = 2

    def __init__(self, vote):
        self.vote = vote

    def sum(self, values):
        assert values[:5] == (0, 0, 0, 0, 0), "only the chief sets these fields"
        return np.add(values, self.vote)
