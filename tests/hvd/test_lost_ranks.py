"""Lost or late ranks: the other ranks report the rank within seconds."""

import json
import resource
import tempfile

import pytest
from hvd.ranks import PROGRAMS, run_ranks

SMALL, LARGE = "10", "2000000"  # by way of rank 0; from rank to rank


@pytest.fixture
def survivors(tmp_path):
    """Returns survivors(failure, size): the errors and stderr of each rank but the last."""

    def get(failure, size, ranks=3, late_secs=0.0, **environ):
        arguments = failure, size, str(tmp_path), str(late_secs)
        errors_and_stderr = []
        for code, out, err in run_ranks(PROGRAMS / "losing.py", ranks, *arguments, environ=environ)[:-1]:
            assert code == 0, err[-3000:]
            errors_and_stderr.append((json.loads(out.splitlines()[-1])["said"], err))
        return errors_and_stderr

    return get


@pytest.mark.parametrize("failure", ["kill", "exit", pytest.param("raise", marks=pytest.mark.slow)])
def test_all_other_ranks_report_the_lost_rank(failure, survivors):
    for errors, _ in survivors(failure, SMALL):
        for error_type, text, secs in errors:
            assert error_type == "LostRankError" and "rank 2" in text
            assert secs < 30  # a hang ends with the test's timeout only


@pytest.mark.slow
def test_a_rank_that_dies_between_two_bytes_does_not_leave_others_waiting(survivors):
    for errors, _ in survivors("kill_in_the_middle", LARGE):
        assert errors[0][0] == "LostRankError" and "rank 2" in errors[0][1]


@pytest.mark.slow
def test_who_was_shut_down_is_missed_at_once(survivors):
    for errors, _ in survivors("shutdown", SMALL, ranks=2, HOROVOD_STALL_CHECK_TIME_SECONDS="0"):
        assert {error_type for error_type, _, _ in errors} == {"LostRankError"}
        assert "rank 1 has left" in errors[0][1]


def test_a_stalled_rank_is_named_and_waited_for(survivors):
    (errors, err), (other_errors, _) = survivors(
        "late", SMALL, late_secs=3.0, HOROVOD_STALL_CHECK_TIME_SECONDS="1"
    )
    assert errors == other_errors == [["no error", "", 0.0]]
    assert "missing rank 2" in err and "ranks 0, 1 waiting for" in err


@pytest.mark.slow
def test_a_stall_can_be_made_an_error(survivors):
    errors_and_stderr = survivors(
        "late", SMALL, late_secs=8.0,
        HOROVOD_STALL_CHECK_TIME_SECONDS="1", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="3",
    )  # fmt: skip
    for errors, _ in errors_and_stderr:
        assert errors[0][0] == "LostRankError" and "rank 2" in errors[0][1] and "within 3 s" in errors[0][1]


def broken(failure, ranks=2, killed=0, **environ):
    """Returns the output and stderr of each rank. `killed` ranks were killed and have no output."""
    with tempfile.TemporaryDirectory() as directory:
        results = run_ranks(PROGRAMS / "breaking.py", ranks, failure, directory, environ=environ)
    codes = sorted(code for code, _, _ in results)  # a rank that hangs is killed by run_ranks
    assert codes == [-9] * killed + [0] * (ranks - killed), [err[-3000:] for _, _, err in results]
    return [(json.loads(out.splitlines()[-1]), err) for code, out, err in results if code == 0]


def test_a_full_disk_under_the_timeline_ends_the_timeline_only():
    outputs = broken("timeline")
    assert [outcome["said"] for outcome, _ in outputs] == [["no error", 2.0]] * 2
    assert "cannot write the timeline: No space left on device" in outputs[0][1]


def test_a_failure_of_the_coordinator_is_reported_on_every_rank():
    for outcome, _ in broken("coordinator", ranks=3):
        error_type, text = outcome["said"]
        assert error_type == "LostRankError" and "the coordinator of rank 0 failed" in text
        assert "RuntimeError: on purpose" in text and outcome["secs"] < 60


@pytest.mark.parametrize("failure", [
    "stop_in_an_exchange", pytest.param("stop_rank_0", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_that_is_stopped_is_an_error_where_stalls_are(failure):
    limits = {"SHUTDOWN": "6", "CHECK": "1"}  # no running rank is that late
    environ = {f"HOROVOD_STALL_{name}_TIME_SECONDS": secs for name, secs in limits.items()}
    for outcome, _ in broken(failure, ranks=3, killed=1, **environ):
        error_type, text = outcome["said"]
        assert error_type == "LostRankError" and "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in text, text
        assert outcome["secs"] < 60


def test_one_eager_call_more_is_an_error_that_names_both_lines():
    for outcome, _ in broken("one_more"):
        error_type, text = outcome["said"]
        assert error_type == "FailedPreconditionError" and "different lines of the program" in text
        assert text.count("breaking.py:") == 2 and "rank 0 in" in text and "rank 1 in" in text


@pytest.mark.parametrize("failure", [
    "round_more", pytest.param("round_more_of_rank_0", marks=pytest.mark.slow),
    pytest.param("round_more_when_alone", marks=pytest.mark.slow),
])  # fmt: skip
def test_one_round_more_of_the_same_line_is_an_error_once_the_others_are_done(failure):
    outcomes = [rank_outcome for rank_outcome, _ in broken(failure)]
    outcome = outcomes.pop(0 if failure == "round_more_of_rank_0" else 1)
    assert [other_outcome["said"] for other_outcome in outcomes] == [["no error", "done"]]
    error_type, text = outcome["said"]
    lost_rank = 1 if failure == "round_more_of_rank_0" else 0
    assert error_type == "LostRankError" and f"rank {lost_rank} " in text and outcome["secs"] < 60, text
    assert "its script has ended" in text or failure == "round_more_when_alone"


def test_ranks_may_call_one_collective_from_different_lines():
    assert [outcome["said"] for outcome, _ in broken("branches")] == [["no error", 4.0]] * 2


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="fewer than 4096 open files allowed"
)
def test_descriptors_beyond_1023_are_as_good_as_others():
    assert [outcome["said"] for outcome, _ in broken("descriptors")] == [["no error", 2.0]] * 2


UNCAUGHT = """
import os, signal
import ctl.hvd as hvd, tensorflow as tf
hvd.init()
hvd.allreduce(tf.ones(3))
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if hvd.rank() == 0:
    hvd.allreduce(tf.ones(3))
tf.function(lambda: hvd.allreduce(tf.ones(3)))()
"""


WRAPPED = """
import os, signal, sys
import ctl.hvd as hvd, tensorflow as tf
hvd.init()
hvd.allreduce(tf.ones(3))
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)

def rows():
    while True:
        yield hvd.allreduce(tf.ones(3)).numpy()

if hvd.rank() == 0:  # as an element of a dataset
    for _ in tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([3])):
        pass
try:
    while True:
        hvd.allreduce(tf.ones(3))
finally:
    open("/nowhere/else")
"""


def test_the_survivor_of_a_lost_rank_ends_with_134_even_if_the_error_is_replaced():
    """1 would be final for the scripts of platforms."""
    first, _, last = run_ranks(WRAPPED, 3)
    assert (first[0], last[0]) == (134, 134), first[2][-2000:] + last[2][-2000:]
    assert "FileNotFoundError" in last[2]


def test_a_script_that_does_not_catch_the_error_ends_with_the_exit_code_of_a_retry():
    first, _, last = run_ranks(UNCAUGHT, 3)
    for code, _, err in (first, last):
        assert code == 134 and "LostRankError" in err, err[-2000:]
