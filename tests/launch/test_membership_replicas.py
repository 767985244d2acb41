"""Membership of an elastic job of `ctl launch`: numbers of replicas, replaced hosts, lost members."""

import pytest
from ctl.launch.membership import ADDED, REMOVED, find_absent_members, find_leaving_workers
from test_membership import Job


def create_job(*hosts, **limits):
    """Returns a job in which processes that leave count for the maximum."""
    return Job(*hosts, **{"initial": 1, "counts_leaving": True, "cooldown": (0.5, 5.0), **limits})


def replicas(job):
    """Returns the number of each process -> the number of its replica."""
    return {number: worker.replica for number, worker in job.membership.workers.items()}


def leave(job):
    """Dismisses the processes that have to leave, which then end. Returns their numbers."""
    numbers = [worker.number for worker in find_leaving_workers(job.membership)]
    for number in numbers:
        job.membership.dismiss(number)
        job.membership.remove_worker(number, is_success=True)
    return numbers


def test_replicas_of_all_hosts_have_different_numbers_and_a_replacement_has_the_lowest_free_one():
    job = create_job("a:2", "b:2", maximum=4)
    job.start_first_group()
    assert replicas(job) == {0: 0, 1: 1, 2: 2, 3: 3}
    job.lose(3)
    job.lose(1)
    job.now_secs += 5
    assert job.start_workers() == [4, 5]
    assert replicas(job) == {0: 0, 2: 2, 4: 1, 5: 3}


def test_a_replacement_on_a_spare_slot_stays_when_the_host_of_the_loss_is_usable_again():
    job = create_job("a:1", "b:2", maximum=2)
    job.start_first_group()
    job.lose(0)
    assert job.start_workers() == [2]
    job.now_secs += 60
    assert job.join(1) == [1]
    assert job.membership.find_surplus_workers() == [] and job.start_workers() == []
    assert job.join(2) is None and job.membership.find_change() == ADDED


def test_a_process_on_a_new_host_starts_after_the_end_of_the_one_that_leaves():
    job = create_job("a:1", "b:1", maximum=2)
    job.start_first_group()
    job.set_hosts("b:1", "c:1")
    assert job.start_workers() == [] and job.membership.find_change() == REMOVED
    assert job.join(0, 1) == [1]
    assert job.start_workers() == [] and leave(job) == [0]
    assert job.start_workers() == [2] and replicas(job) == {1: 1, 2: 0}


def test_a_member_leaves_for_its_successor_although_the_group_is_then_too_small():
    job = create_job("a:1", "b:1", initial=2, minimum=2, maximum=2)
    job.start_first_group()
    job.set_hosts("b:1")
    assert job.membership.find_change() == 0, "without a successor it stays"
    job.set_hosts("b:1", "c:1")
    assert job.membership.find_change() == REMOVED
    assert job.join(0) is None and leave(job) == [], "the other member may be lost"
    assert job.join(1) is None and leave(job) == [0]
    assert job.start_workers() == [2]
    assert job.join(2) == [1, 2]


def test_hosts_that_are_all_replaced_leave_one_after_the_other_and_pass_the_state_on():
    job = create_job("a:1", "b:1", maximum=2)
    job.start_first_group()
    job.set_hosts("c:1", "d:1")
    assert job.membership.find_change() == REMOVED and job.start_workers() == []
    assert job.join(0, 1) == [0] and leave(job) == [1]
    assert job.start_workers() == [2]
    job.sync(0)
    assert job.join(2) is None and job.join(0) == [0, 2]
    assert job.membership.find_change() == 0, "the new process has no state yet"
    job.sync(0, 2)
    assert job.membership.find_change() == REMOVED
    assert job.join(0, 2) == [2] and leave(job) == [0]
    assert job.start_workers() == [3] and replicas(job) == {2: 1, 3: 0}


def test_members_that_do_not_wait_are_absent_once_another_member_waits():
    job = create_job("a:1", "b:1", "c:1", maximum=3)
    assert job.start_workers() == [0, 1, 2] and find_absent_members(job.membership) == []
    assert job.join(0, 1, 2) == [0, 1, 2]
    assert find_absent_members(job.membership) == []
    job.join(1)
    assert [worker.number for worker in find_absent_members(job.membership)] == [0, 2]


@pytest.mark.parametrize("secs", [5.0, 30.0])
def test_the_first_group_waits_for_further_processes_for_the_given_time(secs):
    job = create_job("a:1", "b:1", maximum=2, first_group_secs=secs)
    job.start_workers()
    assert job.join(0) is None
    job.now_secs += secs - 1
    assert job.form_group() is None
    job.now_secs += 1
    assert job.form_group() == [0]
