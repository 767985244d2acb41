"""Why the loop ends, on one worker of two: the same on both, whatever reached only one of them."""

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
    """Steps that take no time."""

    totals, reducer, has_run = Totals(), SumReducer(), True

    def run(self, batches, steps, packed):
        return packed, steps

    def pacing(self):
        return SynchronousPacing()

    def refresh(self):
        pass


class Agreement:
    """With another worker, which has wishes of its own; `then` comes after they were added up."""

    num_workers = 2

    def __init__(self, other, then):
        self.other, self.then = other, then

    def sum(self, values):
        assert isinstance(values, Vote)
        theirs = Vote(**dict(zip(("stop", "sigterm", "interrupt"), self.other, strict=True)))
        self.then()
        return np.add(values, theirs)


def ended(signals, other, then=lambda: None):
    """(why, after which step)"""
    batches = Batches(object(), None, False, None, "skip", "")
    steps = TrainLoop(
        Steps(), batches, Marks(Intervals(steps_per_loop=1, log=Every(), save=Every())),
        Agreement(other, then),
        is_chief=True, writers=WriterGroup([]),
    )  # fmt: skip
    *_, last = steps.loops(0, 100, signals)
    return last.end, last.step


def test_a_signal_that_comes_after_workers_have_agreed_to_stop_changes_nothing():
    """The other one knows nothing of it, and goes on to the last evaluation."""
    signals = Interruption()
    came = ended(signals, [1, 0, 0], then=lambda: signals._handle(SIGTERM, None))
    assert came == (RunEnd.STOPPED, 1) and signals.received == SIGTERM


@pytest.mark.parametrize(
    ("here", "there", "agreed"),
    [
        (None, [0, 1, 0], SIGTERM), (None, [0, 0, 1], SIGINT), (SIGINT, [0, 0, 1], SIGINT),
        (SIGINT, [0, 1, 0], SIGTERM), (SIGTERM, [1, 0, 1], SIGTERM),
    ],
)  # fmt: skip
def test_a_signal_to_any_worker_is_one_to_all_and_sigterm_comes_first(here, there, agreed):
    signals = Interruption()
    if here:
        signals._handle(here, None)
    assert ended(signals, there) == (RunEnd.SIGNAL, 1)
    assert signals.received == agreed


def test_the_chief_s_clock_and_length_hold_on_all_workers():
    """A worker that is not the chief leaves these fields at 0, and takes what was added up."""
    chiefs = Vote(length=7, wait=3, save=1)
    assert chiefs.due == Action.SAVE
    steps = TrainLoop(
        Steps(), Batches(object(), None, False, None, "skip", ""),
        Marks(Intervals(steps_per_loop="auto", log=Every(), save=Every())), Chief(chiefs),
        is_chief=False, writers=WriterGroup([]),
    )  # fmt: skip
    first, second = (loop for loop, _ in zip(steps.loops(0, 100, Interruption()), range(2), strict=False))
    assert (first.step, first.due) == (1, Action.SAVE) and second.step == 8


class Chief:
    """Another worker, who is the chief."""

    num_workers = 2

    def __init__(self, vote):
        self.vote = vote

    def sum(self, values):
        assert values[:5] == (0, 0, 0, 0, 0), "only the chief says so"
        return np.add(values, self.vote)
