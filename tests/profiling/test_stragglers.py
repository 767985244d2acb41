"""Detection of stragglers from the waiting times of the workers."""

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


def add_loops(stragglers, count, waits, inputs=(0.0, 0.0, 0.0), steps=10, secs=1.0):
    """Adds loops with waiting times per worker in all-reduces and for input."""
    for _ in range(count):
        stragglers.completed(loop_of(steps, secs))
        stragglers.take_sums([*waits, *inputs])


def make_stragglers(index=0, addresses=ADDRESSES):
    stragglers = Stragglers(lambda: np.zeros(2), addresses, index)
    stragglers.completed(loop_of(1, None))
    stragglers.take_sums([0.0, 9.0, 9.0, 0.0, 0.0, 0.0])  # a loop with compilation does not count
    return stragglers


def test_the_slowest_is_named_once_with_its_cost_and_its_cause(messages):
    stragglers = make_stragglers()
    add_loops(stragglers, 2, (0.5, 0.1, 0.4))
    assert messages() == []
    add_loops(stragglers, 4, (0.5, 0.1, 0.4))
    (message,) = messages()
    assert message.startswith("Worker 1 (b:2) is slower") and "35 % of each step (35.0 ms)" in message
    assert "The cause is its step" in message


def test_the_cause_is_the_input_if_it_is_most_of_the_difference(messages):
    add_loops(make_stragglers(), 3, (0.5, 0.1, 0.5), inputs=(0.0, 0.35, 0.05))
    assert "The cause is its input" in messages()[0]


def test_another_straggler_and_the_end_are_logged(messages):
    stragglers = make_stragglers()
    add_loops(stragglers, 3, (0.5, 0.1, 0.4))
    add_loops(stragglers, 3, (0.1, 0.5, 0.5))
    add_loops(stragglers, 4, (0.3, 0.32, 0.31))
    assert [m.partition(")")[0] for m in messages()] == [
        "Worker 1 (b:2", "Worker 0 (a:1", "Worker 0 (a:1"
    ]  # fmt: skip
    assert "keeps up with the others again" in messages()[-1]


@pytest.mark.parametrize("case", ["little", "turns", "few", "short", "no clock"])
def test_a_worker_that_is_no_straggler_is_not_named(messages, case):
    stragglers = make_stragglers()
    if case == "little":
        add_loops(stragglers, 9, (0.50, 0.41, 0.50))
    for waits in [(0.5, 0.1, 0.5), (0.1, 0.5, 0.5)] * 5 if case == "turns" else []:
        add_loops(stragglers, 1, waits)
    if case == "few":
        add_loops(stragglers, 4, (0.5, 0.1, 0.5), steps=1)
    if case == "no clock":
        add_loops(stragglers, 9, (0.5, 0.1, np.nan))
    if case == "short":
        add_loops(stragglers, 9, (0.05, 0.01, 0.05), secs=0.1)
    assert messages() == []


def test_a_loop_with_compilation_restarts_the_window(messages):
    stragglers = make_stragglers()
    for _ in range(4):
        add_loops(stragglers, 1, (0.5, 0.1, 0.5), steps=4)
        stragglers.completed(loop_of(1, None))
        stragglers.take_sums([0.0] * 6)
    assert messages() == []


def test_each_worker_adds_its_new_waiting_times_and_only_the_chief_logs(messages):
    totals = iter([np.array([5.0, 1.0]), np.array([7.0, 1.5])])
    stragglers = Stragglers(lambda: next(totals), ADDRESSES, 1)
    assert not any(stragglers.values_to_sum())
    assert stragglers.values_to_sum() == [0, 2.0, 0, 0, 0.5, 0]
    add_loops(stragglers, 9, (0.5, 0.1, 0.4))
    assert messages() == []


def test_on_one_host_only_a_lasting_straggler_is_named(messages):
    stragglers = make_stragglers(addresses=("a:1", "a:2", "a:3"))
    add_loops(stragglers, 11, (0.5, 0.1, 0.4))
    assert messages() == []
    add_loops(stragglers, 1, (0.5, 0.1, 0.4))
    assert "Worker 1 (a:2) is slower" in messages()[0]
    alternating = make_stragglers(addresses=("a:1", "a:2", "a:3"))
    for _ in range(6):
        add_loops(alternating, 5, (0.5, 0.1, 0.4))
        add_loops(alternating, 5, (0.1, 0.5, 0.4))
    assert len(messages()) == 1
