"""A rank that is gone, or late: the others know within seconds, and know which one."""

import json

import pytest
from hvd.ranks import PROGRAMS, run_ranks

SMALL, LARGE = "10", "2000000"  # by way of rank 0; from rank to rank


def survivors(how, size, ranks=3, **environ):
    done = run_ranks(PROGRAMS / "losing.py", ranks, how, size, environ=environ)
    found = []
    for code, out, err in done[:-1]:
        assert code == 0, err[-3000:]
        found.append((json.loads(out.splitlines()[-1])["said"], err))
    return found


@pytest.mark.parametrize("how", ["kill", "exit", pytest.param("raise", marks=pytest.mark.slow)])
def test_all_others_are_told_which_rank_is_gone(how):
    for said, _ in survivors(how, SMALL):
        for kind, text, secs in said:
            assert kind == "LostRankError" and "rank 2" in text
            assert secs < 30  # a hang ends with the test's timeout only


@pytest.mark.slow
def test_a_rank_that_dies_between_two_bytes_does_not_leave_others_waiting():
    for said, _ in survivors("kill_in_the_middle", LARGE):
        assert said[0][0] == "LostRankError" and "rank 2" in said[0][1]


@pytest.mark.slow
def test_who_was_shut_down_is_missed_at_once():
    for said, _ in survivors("shutdown", SMALL, ranks=2, HOROVOD_STALL_CHECK_TIME_SECONDS="0"):
        assert {kind for kind, _, _ in said} == {"LostRankError"}
        assert "rank 1 has left" in said[0][1]


def test_a_stalled_rank_is_named_and_waited_for():
    (said, err), (again, _) = survivors("late", SMALL, HOROVOD_STALL_CHECK_TIME_SECONDS="1")
    assert said == again == [["no error", "", 0.0]]
    assert "missing rank 2" in err and "ranks 0, 1 wait since" in err


@pytest.mark.slow
def test_a_stall_can_be_made_an_error():
    found = survivors(
        "late", SMALL, HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3"
    )
    for said, _ in found:
        assert (
            said[0][0] == "LostRankError" and "rank 2" in said[0][1] and "within 3 s" in said[0][1]
        )
