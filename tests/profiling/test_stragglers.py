"""Which worker the others wait for, from what each waits: named once, and only if it costs enough."""

import logging

import numpy as np
import pytest
from ctl.profiling.loop_observer import CompletedLoop
from ctl.profiling.stragglers import Stragglers

ADDRESSES = ("a:1", "b:2", "c:3")


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, "ctl")
    return lambda: [record.getMessage() for record in caplog.records]


def loop_of(steps, secs):
    return CompletedLoop(0, steps, 0.0, secs or 0.0, is_timed=secs is not None)


def windows(seen, count, waits, inputs=(0.0, 0.0, 0.0), steps=10, secs=1.0):
    """So many loops of which each worker has waited so long in sums, and for its input."""
    for _ in range(count):
        seen.completed(loop_of(steps, secs))
        seen.take_sums([*waits, *inputs])


def started(index=0, addresses=ADDRESSES):
    seen = Stragglers(lambda: np.zeros(2), addresses, index)
    seen.completed(loop_of(1, None))
    seen.take_sums([0.0, 9.0, 9.0, 0.0, 0.0, 0.0])  # it compiled: counts for nothing
    return seen


def test_the_slowest_is_named_once_with_its_cost_and_its_cause(messages):
    seen = started()
    windows(seen, 2, (0.5, 0.1, 0.4))
    assert messages() == []
    windows(seen, 4, (0.5, 0.1, 0.4))
    (said,) = messages()
    assert said.startswith("Worker 1 (b:2) is slower") and "35 % of each step (35.0 ms)" in said
    assert "It is its step that takes longer" in said


def test_it_is_the_input_if_that_makes_most_of_the_difference(messages):
    windows(started(), 3, (0.5, 0.1, 0.5), inputs=(0.0, 0.35, 0.05))
    assert "It is its input that takes longer" in messages()[0]


def test_another_one_and_the_end_are_told(messages):
    seen = started()
    windows(seen, 3, (0.5, 0.1, 0.4))
    windows(seen, 3, (0.1, 0.5, 0.5))
    windows(seen, 4, (0.3, 0.32, 0.31))
    assert [m.partition(")")[0] for m in messages()] == [
        "Worker 1 (b:2", "Worker 0 (a:1", "Worker 0 (a:1"
    ]  # fmt: skip
    assert "keeps up with the others again" in messages()[-1]


@pytest.mark.parametrize("what", ["little", "turns", "few", "short", "no clock"])
def test_what_is_no_straggler_is_not_named(messages, what):
    seen = started()
    if what == "little":
        windows(seen, 9, (0.50, 0.41, 0.50))
    for waits in [(0.5, 0.1, 0.5), (0.1, 0.5, 0.5)] * 5 if what == "turns" else []:
        windows(seen, 1, waits)
    if what == "few":
        windows(seen, 4, (0.5, 0.1, 0.5), steps=1)
    if what == "no clock":
        windows(seen, 9, (0.5, 0.1, np.nan))
    if what == "short":
        windows(seen, 9, (0.05, 0.01, 0.05), secs=0.1)
    assert messages() == []


def test_a_loop_that_compiles_begins_the_window_anew(messages):
    seen = started()
    for _ in range(4):
        windows(seen, 1, (0.5, 0.1, 0.5), steps=4)
        seen.completed(loop_of(1, None))
        seen.take_sums([0.0] * 6)
    assert messages() == []


def test_each_worker_adds_what_is_new_at_its_own_place_and_only_the_chief_speaks(messages):
    totals = iter([np.array([5.0, 1.0]), np.array([7.0, 1.5])])
    seen = Stragglers(lambda: next(totals), ADDRESSES, 1)
    assert not any(seen.values_to_sum())
    assert seen.values_to_sum() == [0, 2.0, 0, 0, 0.5, 0]
    windows(seen, 9, (0.5, 0.1, 0.4))
    assert messages() == []


def test_on_one_host_only_what_lasts_is_named(messages):
    seen = started(addresses=("a:1", "a:2", "a:3"))
    windows(seen, 11, (0.5, 0.1, 0.4))
    assert messages() == []
    windows(seen, 1, (0.5, 0.1, 0.4))
    assert "Worker 1 (a:2) is slower" in messages()[0]
    turns = started(addresses=("a:1", "a:2", "a:3"))
    for _ in range(6):
        windows(turns, 5, (0.5, 0.1, 0.4))
        windows(turns, 5, (0.1, 0.5, 0.4))
    assert len(messages()) == 1
