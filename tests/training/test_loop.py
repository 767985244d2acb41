"""Why the loop ends, on one worker of two: the same on both, whatever reached only one of them."""

from signal import SIGINT, SIGTERM

import numpy as np
import pytest
from ctl.callbacks.schedule import Every, Intervals
from ctl.data.batches import Batches
from ctl.metrics.group import WriterGroup
from ctl.step.averaging import Totals
from ctl.supervision.signals import Signals
from ctl.training.loop import Actions, Synchronous

NUMBERS = 8  # that workers add up after a loop; the last three: stop, SIGTERM, Ctrl-C


class Steps:
    """Steps that take no time."""

    totals, has_run = Totals(), True

    def run(self, batches, steps, packed):
        return packed, steps


class Agreement:
    """With another worker, which has wishes of its own; `then` comes after they were added up."""

    num_workers = 2

    def __init__(self, other, then):
        self.other, self.then = other, then

    def sum(self, values):
        if len(values) != NUMBERS:
            return np.asarray(values, np.float64)
        total = np.asarray(values, np.float64)
        total[-3:] += self.other
        self.then()
        return total


def ended(signals, other, then=lambda: None):
    """Why, and what was saved."""
    saved = []
    actions = Actions(
        evaluate=None, save=lambda step, *_: saved.append(step), learning_rate=lambda: None,
        after_loop=None, check_examples=lambda _: None,
    )  # fmt: skip
    loop = Synchronous(
        loop=Steps(), intervals=Intervals(steps_per_loop=1, log=Every(), save=Every()),
        agreement=Agreement(other, then), is_chief=True, writers=WriterGroup([]), actions=actions,
    )  # fmt: skip
    batches = Batches(object(), None, False, None, "skip", "")
    return loop.run(batches, step=0, steps=100, signals=signals), saved


def test_a_signal_that_comes_after_workers_have_agreed_to_stop_changes_nothing():
    """The other one knows nothing of it, and goes on to the last evaluation."""
    signals = Signals()
    came = ended(signals, [1, 0, 0], then=lambda: signals._handle(SIGTERM, None))
    assert came == ("stopped", [1]) and signals.received == SIGTERM


@pytest.mark.parametrize(
    ("here", "there", "agreed"),
    [
        (None, [0, 1, 0], SIGTERM), (None, [0, 0, 1], SIGINT), (SIGINT, [0, 0, 1], SIGINT),
        (SIGINT, [0, 1, 0], SIGTERM), (SIGTERM, [1, 0, 1], SIGTERM),
    ],
)  # fmt: skip
def test_a_signal_to_any_worker_is_one_to_all_and_sigterm_comes_first(here, there, agreed):
    signals = Signals()
    if here:
        signals._handle(here, None)
    assert ended(signals, there) == ("signal", [1])
    assert signals.received == agreed
