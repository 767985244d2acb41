"""Steps per second and the remaining time, with a manual clock."""

import pytest
from ctl.metrics.pace import Pace
from terminals import Clock

COMPILE_SECS = 20.0


def compiled(total, clock, start=0):
    """Returns a pace after the compilation in the first loop, which has one step."""
    pace = Pace(clock, start, total)
    clock.now += COMPILE_SECS
    pace.tick(start + 1)
    return pace


@pytest.mark.parametrize("secs_per_loop", [0.001, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("start", [0, 5000])
def test_the_eta_is_correct_from_the_first_second(secs_per_loop, start):
    """Training takes 10 seconds with loops of any length, after a longer compilation."""
    clock = Clock()
    loops = round(10 / secs_per_loop)
    pace = compiled(start + 1 + loops, clock, start)
    for loop in range(loops):
        clock.now += secs_per_loop
        pace.tick(start + 2 + loop)
        trained = (loop + 1) * secs_per_loop
        if trained >= 0.02:
            assert pace.eta_secs == pytest.approx(10 - trained, rel=0.01, abs=1e-6)
            assert pace.steps_per_sec == pytest.approx(1 / secs_per_loop, rel=0.01)


def test_there_is_no_speed_while_the_first_loop_compiles_and_right_after_it():
    clock = Clock()
    pace = compiled(100, clock)
    assert pace.steps_per_sec is None and pace.eta_secs is None
    clock.now += 0.5
    pace.tick(1)  # the checkpoint of the first step
    assert pace.steps_per_sec is None and pace.eta_secs is None
    assert pace.elapsed_secs == COMPILE_SECS + 0.5


def test_the_eta_at_the_end_is_0_without_a_speed():
    assert compiled(1, Clock()).eta_secs == 0


def test_a_tick_without_a_step_does_not_end_the_loop_that_compiles():
    """Parameter servers: the chief polls the step counter while workers compile."""
    clock = Clock()
    pace = Pace(clock, 0, 100)
    pace.tick(0)
    clock.now += COMPILE_SECS
    pace.tick(1)
    clock.now += 1
    pace.tick(2)
    assert pace.steps_per_sec == 1


@pytest.mark.parametrize("compiles", ["the step again", "the first evaluation"])
def test_later_compilations_do_not_count(compiles):
    clock = Clock()
    pace = Pace(clock, 0, 1000)
    for step in range(1, 101):
        clock.now += 0.01
        pace.tick(step)
    clock.now += COMPILE_SECS
    if compiles == "the step again":
        pace.exclude_loop()
    else:
        pace.note_evaluation()
        clock.now += 0.01
    pace.tick(101)
    clock.now += 0.01
    pace.tick(102)
    assert pace.steps_per_sec == pytest.approx(100, rel=0.01)
    assert pace.eta_secs == pytest.approx(8.98, rel=0.01)


def test_later_evaluations_count_for_the_eta():
    clock = Clock()
    pace = compiled(21, clock)
    for step in range(2, 12):
        clock.now += 0.1
        pace.tick(step)
        clock.now += 0.9
        pace.note_evaluation()
    assert pace.eta_secs == pytest.approx(10, rel=0.2)


def test_a_rollback_does_not_reduce_the_speed():
    clock = Clock()
    pace = compiled(100, clock)
    for step in (11, 21, 5, 15):
        clock.now += 1
        pace.tick(step)
    assert pace.steps_per_sec == pytest.approx(30 / 4)
