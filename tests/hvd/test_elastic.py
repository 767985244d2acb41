"""Elastic jobs of real processes: ranks die, join and leave, and no step is lost or repeated."""

import os
import signal
import socket

import pytest
from elastic_jobs import ElasticJob

pytestmark = pytest.mark.workers


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(*arguments, **options):
        jobs.append(ElasticJob(tmp_path, *arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def exact(facts: list[dict]) -> bool:
    """Checks that all ranks reported the same, and that every step was executed once."""
    return all(f["weights"] == [float(f["step"])] * f["size"] for f in facts)


def pids(facts: list[dict]) -> list[int]:
    return [f["pid"] for f in facts]


@pytest.mark.parametrize(
    "victim", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["rank 0", "the last rank"]
)
def test_survivors_of_a_killed_rank_continue_at_once_and_a_new_process_joins_them(start, victim):
    job = start("127.0.0.1:3", "-np", "3", "--min-np", "2", last_step=9)
    before = job.wait_for_step(3, size=3)
    os.kill(before[victim]["pid"], signal.SIGKILL)
    job.wait(lambda: "SIGKILL" in job.output)
    job.wait(lambda: "group 3: 3 ranks" in job.output)
    job.go(9)
    after = job.wait_for_step(9, size=3)
    code, output = job.end()
    assert code == 0, output[-6000:]
    survivors = [pid for pid in pids(before) if pid != before[victim]["pid"]]
    assert pids(after)[:2] == survivors  # the oldest first, and in the same processes
    assert pids(after)[2] not in pids(before)
    assert "group 2: 2 ranks" in output
    assert after[0]["resets"] == [2, 3] and after[2]["resets"] == []
    assert exact(f for f in job.facts if "step" in f)


def test_a_step_that_was_not_committed_is_done_again_by_the_survivors(start):
    job = start("127.0.0.1:2", "-np", "2", "--min-np", "1", "--reset-limit", "1", last_step=12)
    before = job.wait_for_step(3, size=2)
    job.die(7)  # in the middle of it
    job.go(12)
    after = job.wait_for_step(12, size=1)
    code, output = job.end()
    assert code == 0, output[-6000:]
    assert pids(after) == [before[0]["pid"]]
    assert exact(f for f in job.facts if "step" in f)
    assert len(job.steps(6, size=2)) == 2 and len(job.steps(7, size=1)) == 1


def test_a_host_that_is_named_later_gets_processes_which_take_the_state(start):
    job = start("127.0.0.1:1", "-np", "1", "--min-np", "1", "--max-np", "3", last_step=6)
    before = job.wait_for_step(3, size=1)
    job.hosts("127.0.0.1:1", "127.0.0.2:4")
    job.wait(lambda: "group 2: 3 ranks" in job.output or "group 3: 3 ranks" in job.output)
    job.go(6)
    after = job.wait_for_step(6, size=3)
    assert not any(f["is_measured"] for f in before) and all(f["is_measured"] for f in after)
    assert not any(f["shares_memory"] for f in (*before, *after))
    code, output = job.end()
    assert code == 0, output[-6000:]
    assert pids(after)[0] == pids(before)[0] and len(set(pids(after))) == 3
    assert exact(f for f in job.facts if "step" in f)
    assert "exit code" not in output and "SIGKILL" not in output


def test_processes_of_a_removed_host_leave_and_the_others_continue(start):
    job = start("127.0.0.1:1 127.0.0.2:1", "-np", "2", "--min-np", "1", last_step=6)
    before = job.wait_for_step(3, size=2)
    job.hosts("127.0.0.2:1")  # the host of rank 0 is removed
    job.wait(lambda: "group 2: 1 ranks" in job.output)
    job.go(6)
    after = job.wait_for_step(6, size=1)
    code, output = job.end()
    assert code == 0, output[-6000:]
    assert pids(after) == [before[1]["pid"]]
    assert "has released this process" in output
    assert exact(f for f in job.facts if "step" in f)


@pytest.mark.slow
def test_all_hosts_can_be_replaced_by_others_and_the_state_moves(start):
    job = start("127.0.0.1:1", "-np", "1", "--min-np", "1", last_step=6)
    before = job.wait_for_step(3, size=1)
    job.hosts("127.0.0.2:1")
    job.wait(lambda: "no longer has a slot" in job.output)
    job.go(6)
    after = job.wait_for_step(6, size=1)
    code, output = job.end()
    assert code == 0, output[-6000:]
    assert pids(after) != pids(before)
    assert exact(f for f in job.facts if "step" in f)


def test_a_port_that_another_program_took_is_no_end_and_no_reset(start):
    job = start("127.0.0.1:1", "-np", "1", "--min-np", "1", "--reset-limit", "1", last_step=6)
    before = job.wait_for_step(3, size=1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        job.port(port)
        job.hosts("127.0.0.1:2")
        job.wait(lambda: "group 3: 2 ranks" in job.output)
    job.go(6)
    after = job.wait_for_step(6, size=2)
    code, output = job.end()
    assert code == 0, output[-6000:]
    assert f"rank 0 cannot listen at 127.0.0.1:{port}" in output
    assert "process 0 could not connect to its peers in group 2" in output
    assert pids(after)[0] == pids(before)[0] and after[0]["resets"] == [2]
    assert exact(f for f in job.facts if "step" in f)
