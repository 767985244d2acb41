"""Schedules of actions. They depend on the step only, so a resumed run has the same schedule."""

import math
import random

import ctl
import pytest
from ctl.callbacks.schedule import NO_ACTION, Action, Timers


def marks(every, end, steps_per_epoch=None, start=0):
    """Returns the steps up to `end` with an action, by repeated calls of `next_mark`."""
    steps, step = [], start
    while (step := every.next_mark(step, steps_per_epoch)) is not None and step <= end:
        steps.append(step)
    return steps


def test_steps_mark_their_multiples():
    assert marks(ctl.Every(steps=7), 30) == [7, 14, 21, 28]
    assert marks(ctl.Every(steps=1), 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("every", [{}, {"steps": 0}, {"secs": 0}, {"epochs": 0}, {"secs": 60}])
def test_an_interval_without_steps_or_epochs_has_no_marks(every):
    every = ctl.Every(**every)
    assert every.next_mark(5, 10.0) is None
    assert not any(every.is_mark(s, 10.0) for s in range(50))


def test_epochs_mark_the_first_step_that_completes_them():
    assert marks(ctl.Every(epochs=1), 12, 3.0) == [3, 6, 9, 12]
    assert marks(ctl.Every(epochs=1), 13, 10 / 4) == [3, 5, 8, 10, 13]
    assert marks(ctl.Every(epochs=0.5), 7, 10 / 4) == [2, 3, 4, 5, 7]
    assert marks(ctl.Every(epochs=2), 20, 7 / 3) == [5, 10, 14, 19]
    assert marks(ctl.Every(epochs=1), 3, 0.25) == [1, 2, 3], "several epochs in one step"


def test_marks_of_a_resumed_run_are_those_of_an_uninterrupted_one():
    draw = random.Random(0)
    for _ in range(300):
        examples, batch = draw.randint(1, 400), draw.randint(1, 64)
        unit = draw.choice(["steps", "epochs"])
        amount = draw.randint(1, 40) if unit == "steps" else draw.choice([0.1, 0.25, 1 / 3, 1, 2, 7])
        every, per_epoch = ctl.Every(**{unit: amount}), examples / batch
        all_marks = marks(every, 200, per_epoch)
        assert all_marks == [s for s in range(201) if every.is_mark(s, per_epoch)]
        if unit == "epochs":
            expected = {
                math.ceil(k * amount * per_epoch - 1e-6)
                for k in range(1, int(201 / amount / per_epoch) + 2)
            }
            assert all_marks == sorted(m for m in expected if m <= 200)
        start = draw.randint(0, 200)
        assert marks(every, 200, per_epoch, start) == [m for m in all_marks if m > start]


def test_marks_stay_exact_after_many_epochs():
    every, per_epoch = ctl.Every(epochs=1), 60_000 / 128
    for epoch in (10_000, 123_456):
        step = -(-epoch * 60_000 // 128)
        assert every.is_mark(step, per_epoch)
        assert every.next_mark(step - 1, per_epoch) == step


@pytest.mark.parametrize("options", [
    {"steps": -1}, {"steps": 2.5}, {"secs": -0.1}, {"epochs": -1}, {"secs": float("nan")},
    {"epochs": float("inf")}, {"steps": 5, "secs": 5}, {"secs": 1, "epochs": 1},
])  # fmt: skip
def test_every_refuses_invalid_values(options):
    with pytest.raises(ctl.UsageError, match=r"Every got .*expected"):
        ctl.Every(**options)


def test_epochs_of_data_without_a_length_are_refused_with_an_alternative():
    with pytest.raises(ctl.UsageError, match=r"finite train_data.*Every\(steps=\.\.\.\)"):
        ctl.Every(epochs=1).next_mark(0, None)


@pytest.mark.parametrize("value", [0, -1, 1.5, "7", True, "often"])
def test_a_loop_has_a_whole_number_of_steps(value):
    with pytest.raises(ctl.UsageError, match="steps_per_loop is .*'auto'"):
        ctl.Intervals(steps_per_loop=value)


@pytest.mark.parametrize("name", ["log", "evaluate", "save"])
def test_an_interval_is_an_every(name):
    with pytest.raises(ctl.UsageError, match=rf"Intervals\({name}=100\).*ctl.Every\(steps=100\)"):
        ctl.Intervals(**{name: 100})


@pytest.mark.parametrize("make", [
    lambda: ctl.Every(steps="100"), lambda: ctl.Every(secs="60"),
    lambda: ctl.Intervals(steps_per_loop=None), lambda: ctl.Intervals(steps_per_loop=float("inf")),
    lambda: ctl.Keep(newest=None), lambda: ctl.Gradients(clip_norm="1"),
    lambda: ctl.Gradients(accumulate_steps=None),
])  # fmt: skip
def test_a_value_of_another_type_is_a_usage_error(make):
    try:
        make()
    except ctl.UsageError:
        return
    pytest.fail("accepted")


def test_the_next_mark_of_intervals_is_the_first_of_any():
    intervals = ctl.Intervals(
        log=ctl.Every(steps=10), evaluate=ctl.Every(epochs=1), save=ctl.Every(steps=4)
    )
    assert marks(intervals, 20, 7.0) == [4, 7, 8, 10, 12, 14, 16, 20]
    without_marks = ctl.Intervals(log=ctl.Every(), save=ctl.Every(secs=5))
    assert without_marks.next_mark(3) is None


def test_timers_are_due_once_each_by_the_clock_they_are_given():
    intervals = ctl.Intervals(log=ctl.Every(secs=10), save=ctl.Every(secs=25))
    timers = Timers(intervals, time_secs=100.0)
    assert timers
    due = {t: timers.due(time_secs=100.0 + t) for t in (0, 9.9, 10, 19, 20.5, 25, 26, 60)}
    assert due == {
        0: NO_ACTION, 9.9: NO_ACTION, 10: Action.LOG, 19: NO_ACTION, 20.5: Action.LOG, 25: Action.SAVE,
        26: NO_ACTION, 60: Action.LOG | Action.SAVE,
    }  # fmt: skip
    assert not Timers(ctl.Intervals(), time_secs=0.0)
    assert Timers(ctl.Intervals(), time_secs=0.0).due(time_secs=1e9) == NO_ACTION


def test_all_actions_of_a_step_are_due_together():
    intervals = ctl.Intervals(log=ctl.Every(steps=2), evaluate=ctl.Every(steps=6), save=ctl.Every(epochs=1))
    due = [intervals.due(step, 3.0) for step in range(1, 7)]
    log, save = Action.LOG, Action.SAVE
    assert due == [NO_ACTION, log, save, log, NO_ACTION, log | save | Action.EVALUATE]
