"""Membership of an elastic job, without processes: joins, losses, hosts, limits."""

import random

import pytest
from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import Host
from ctl.launch.membership import ADDED, REMOVED, Limits, Membership


class Job:
    """A membership with simulated processes and a manual clock."""

    def __init__(self, *hosts, cooldown=None, **limits):
        self.now_secs = 0.0
        self.health = HostHealth(cooldown, clock=lambda: self.now_secs)
        self.set_hosts(*hosts)
        limits = {"initial": 2, "minimum": 1, **limits}
        self.membership = Membership(Limits(**limits), self.health)

    def set_hosts(self, *hosts):
        self.health.update([Host(name, int(slots)) for name, slots in (h.split(":") for h in hosts)])

    def start_workers(self):
        """Starts a worker in each free slot and returns the worker numbers."""
        return [self.membership.add_worker(slot) for slot in self.membership.find_free_slots()]

    def join(self, *numbers, skips_sync=False):
        for number in numbers:
            self.membership.set_waiting(number, 1000 + number, skips_sync=skips_sync)
        return self.form_group()

    def form_group(self):
        """Returns the worker numbers of the next group by rank, or None."""
        group = self.membership.form_group()
        if group is None:
            return None
        assert [1000 + w.number for w in group.workers] == list(group.ports)
        self.must_sync = group.must_sync
        return [w.number for w in group.workers]

    def sync(self, *numbers):
        for number in numbers:
            self.membership.record_sync(number)

    def lose(self, number):
        worker = self.membership.remove_worker(number, is_success=False)
        if any(h.target == worker.slot.host for h in self.health.hosts):
            self.health.record_failure(worker.slot.host)

    def start_first_group(self):
        """Starts and synchronizes the first group and returns its worker numbers."""
        numbers = self.start_workers()
        assert self.join(*numbers) == numbers
        self.sync(*numbers)
        return numbers


def test_the_first_group_waits_for_all_started_processes():
    job = Job("a:2", "b:1")
    assert job.start_workers() == [0, 1, 2] and job.start_workers() == []
    assert job.join(0, 1) is None
    assert job.join(2) == [0, 1, 2] and job.must_sync


def test_no_process_starts_before_there_are_slots_for_the_first_group():
    job = Job("a:1", initial=2)
    assert job.start_workers() == []
    job.set_hosts("a:1", "b:1")
    assert job.start_workers() == [0, 1]


def test_no_more_processes_than_the_maximum_start():
    job = Job("a:4", maximum=3)
    assert len(job.start_workers()) == 3


def test_survivors_do_not_wait_for_the_replacement_which_joins_later():
    job = Job("a:3")
    job.start_first_group()
    job.lose(0)
    assert job.start_workers() == []  # the backoff is one second
    assert job.join(1) is None
    assert job.join(2) == [1, 2]
    job.sync(1, 2)
    job.now_secs += 1.0
    assert job.start_workers() == [3]
    assert job.membership.find_change() == 0
    assert job.join(3) is None and job.membership.find_change() == ADDED
    assert job.join(1, 2, skips_sync=True) == [1, 2, 3] and job.must_sync
    assert [w.slot.index for w in job.membership.members] == [1, 2, 0]  # the replacement has the free GPU


def test_a_dismissed_process_that_has_not_ended_joins_no_group():
    """The slot may be available again before the process has ended: 3, 1, 2 slots."""
    job = Job("a:3")
    job.start_first_group()
    job.set_hosts("a:1")
    assert job.join(0, 1, 2) == [0]
    job.sync(0)
    for worker in job.membership.find_surplus_workers():
        job.membership.dismiss(worker.number)
    job.set_hosts("a:2")
    assert job.start_workers() == [], "the slot is in use until its process has ended"
    assert job.membership.find_change() == 0 and job.join(1, 2) is None
    for number in (1, 2):
        job.membership.remove_worker(number, is_success=True)
    assert not job.membership.is_finishing
    assert job.start_workers() == [3]
    assert job.join(3) is None and job.membership.find_change() == ADDED
    assert job.join(0) == [0, 3]


def test_a_dismissed_process_does_not_delay_the_first_group():
    job = Job("a:2", "b:1", initial=2)
    assert job.start_workers() == [0, 1, 2]
    job.set_hosts("a:2")
    job.membership.dismiss(2)
    assert job.join(0, 1) == [0, 1]


def test_no_synchronization_is_required_when_all_members_skip_it():
    job = Job("a:1", "b:2")
    job.start_first_group()
    job.set_hosts("b:2")
    assert job.membership.find_change() == REMOVED
    assert job.join(0, 1, 2, skips_sync=True) == [1, 2] and not job.must_sync
    assert [w.number for w in job.membership.find_surplus_workers()] == [0]
    job.set_hosts("b:1")
    assert job.join(1, skips_sync=True) is None
    assert job.join(2, skips_sync=False) == [1]


def test_one_member_that_must_synchronize_makes_all_do_it():
    job = Job("a:2")
    job.start_first_group()
    job.join(0, skips_sync=True)
    assert job.join(1, skips_sync=False) == [0, 1] and job.must_sync


def test_rank_0_has_state_even_if_its_host_is_the_newer_one():
    job = Job("a:1", "b:1")
    job.start_first_group()
    job.lose(0)
    job.now_secs += 5
    assert job.start_workers() == [2]
    job.join(2)
    assert job.join(1) == [1, 2]  # the worker of b is first, though a is the older host


def test_a_group_without_state_is_a_failure_and_no_new_start():
    job = Job("a:2")
    job.start_first_group()
    job.lose(0)
    job.now_secs += 5
    assert job.join(1) == [1]
    (new,) = job.start_workers()
    job.join(new)
    assert job.join(1) == [1, new]
    job.lose(1)
    assert job.join(new) is None and "with the state of the job" in job.membership.failure


def test_hosts_that_are_all_replaced_stay_until_new_hosts_have_the_state():
    job = Job("a:1", initial=1)
    job.start_first_group()
    job.set_hosts("b:1")
    assert job.membership.find_change() == 0
    assert job.start_workers() == [1]
    job.join(1)
    assert job.membership.find_change() == ADDED
    assert job.join(0) == [0, 1]
    assert job.membership.find_change() == 0
    job.sync(0, 1)
    assert job.membership.find_change() == REMOVED
    assert job.join(0, 1) == [1]
    assert [w.number for w in job.membership.find_surplus_workers()] == [0]


def test_a_group_does_not_shrink_below_the_minimum():
    job = Job("a:1", "b:1", minimum=2)
    job.start_first_group()
    job.set_hosts("a:1")
    assert job.membership.find_change() == 0


def test_too_few_processes_wait_for_the_timeout_and_then_fail():
    job = Job("a:2", minimum=2, timeout_secs=60)
    job.start_first_group()
    job.now_secs += 1000  # a long training
    job.lose(1)
    assert job.join(0) is None and job.membership.find_overdue_members() == []
    job.now_secs += 59
    assert job.form_group() is None and job.membership.find_overdue_members() == []
    assert not job.membership.failure
    job.now_secs += 1
    assert job.membership.find_overdue_members() == []
    assert "processes are waiting after 60 s; the job requires 2" in job.membership.failure


def test_a_member_that_does_not_join_is_overdue_and_the_group_continues_without_it():
    job = Job("a:3", timeout_secs=60)
    job.start_first_group()
    job.lose(0)
    assert job.join(1) is None
    job.now_secs += 60
    assert job.form_group() is None and [w.number for w in job.membership.find_overdue_members()] == [2]
    job.lose(2)
    assert job.form_group() == [1]


def test_the_first_group_forms_without_late_processes_if_enough_have_joined():
    job = Job("a:3", initial=2, timeout_secs=60)
    job.start_workers()
    assert job.join(0, 2) is None
    job.now_secs += 60
    assert job.form_group() == [0, 2]
    assert job.join(1) is None and job.membership.find_change() == ADDED


def test_no_process_starts_after_one_has_finished():
    job = Job("a:2")
    job.start_first_group()
    job.membership.remove_worker(0, is_success=True)
    job.now_secs += 100
    assert job.start_workers() == [] and job.membership.find_change() == 0
    assert job.join(1) == [1]


def test_a_group_whose_members_cannot_connect_is_formed_again_without_a_reset():
    job = Job("a:2", max_resets=0)
    job.start_first_group()
    for group in (1, 2):
        record = job.membership.record_connect_failure
        assert record(1, group).rank == 1 and record(0, group).rank == 0
        assert record(0, group - 1) is None and record(7, group) is None
        assert job.join(1) is None
        assert job.join(0) == [0, 1]
    job.lose(1)
    assert job.join(0) is None and "--reset-limit" in job.membership.failure


def test_the_reset_limit_fails_a_job_for_losses_and_ignores_new_hosts():
    job = Job("a:2", max_resets=1)
    job.start_first_group()
    job.lose(1)
    assert job.join(0) == [0]
    job.now_secs += 100
    assert job.start_workers() == [] and job.membership.find_change() == 0
    assert job.join(0) is None and "--reset-limit" in job.membership.failure


def test_a_host_is_retried_with_backoff_and_excluded_after_four_failures():
    job = Job("a:1")
    for delay_secs in (1.0, 2.0, 4.0):
        job.health.record_failure("a")
        assert not job.health.can_start("a")
        job.now_secs += delay_secs
        assert job.health.can_start("a")
    assert "no further process" in job.health.record_failure("a")
    job.now_secs += 1e6
    assert not job.health.can_start("a")
    job.set_hosts()
    job.set_hosts("a:1")  # possibly another machine
    assert job.health.can_start("a")


def test_a_host_that_ssh_cannot_reach_is_retried_forever():
    job = Job("a:4", cooldown=(100, 1000))
    delays = []
    for _ in range(9):
        for _ in range(4):  # the processes of one connection
            assert "retrying the host in" in job.health.record_outage("a")
        start_secs = job.now_secs
        while not job.health.can_start("a"):
            job.now_secs += 0.5
        delays.append(job.now_secs - start_secs)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    job.health.record_connection("a")
    assert job.health.record_outage("a") == "retrying the host in 1 s"
    job.health.exclude("a")
    job.now_secs += 1e6
    assert not job.health.can_start("a")


def test_the_first_group_does_not_wait_for_more_processes_than_it_needs():
    """A host may be unreachable."""
    job = Job("a:1", "b:1", "c:1", initial=1)
    assert job.start_workers() == [0, 1, 2]
    assert job.join(0) is None, "the next process may come at any moment"
    job.now_secs += 4.9
    assert job.join(1) is None
    job.now_secs += 0.2
    assert job.form_group() == [0, 1]
    job.sync(0, 1)
    assert job.join(2) is None and job.membership.find_change() == ADDED


def test_failures_of_an_hour_ago_do_not_count():
    job = Job("a:1")
    for _ in range(10):
        job.health.record_failure("a")
        job.now_secs += 4000
        assert job.health.can_start("a")


def test_with_a_cooldown_range_no_host_is_excluded():
    job = Job("a:1", cooldown=(10, 60))
    delays = []
    for _ in range(6):
        job.health.record_failure("a")
        start_secs = job.now_secs
        while not job.health.can_start("a"):
            job.now_secs += 0.5
        delays.append(job.now_secs - start_secs)
    assert all(10 <= delay <= 60.5 for delay in delays) and delays[-1] >= 60
    assert delays[0] < 31


def test_slots_of_failed_hosts_do_not_count_against_the_maximum():
    job = Job("a:1", "b:1", "c:1", maximum=2)
    job.start_first_group()
    for _ in range(4):
        job.health.record_failure("a")
    job.membership.remove_worker(0, is_success=False)
    assert [slot.host for slot in job.membership.find_free_slots()] == ["c"]


@pytest.mark.parametrize("seed", range(30))
def test_groups_are_valid_after_random_events(seed):
    generator = random.Random(seed)
    job = Job("a:2", "b:2", timeout_secs=1e9, cooldown=(1, 2))
    names = ["a:1", "a:2", "b:1", "b:2", "c:3", "d:1"]
    newest = 0
    for _ in range(400):
        job.now_secs += generator.random()
        event = generator.random()
        alive = list(job.membership.workers)
        if event < 0.1:
            new_hosts = generator.sample(names, generator.randint(1, 3))
            job.set_hosts(*{p.split(":")[0]: p for p in new_hosts}.values())
        elif event < 0.2 and len(job.membership.members) > 1:
            job.lose(generator.choice(alive))
        elif event < 0.7 and alive:
            job.membership.set_waiting(generator.choice(alive), 1, skips_sync=generator.random() < 0.5)
        elif event < 0.8:
            job.sync(*(w.number for w in job.membership.members if not w.port))
        waiting = {n for n, w in job.membership.workers.items() if w.port}
        had_state = {n for n, w in job.membership.workers.items() if w.has_state}
        group = job.membership.form_group()
        if group:
            chosen = {w.number for w in group.workers}
            assert group.number == newest + 1 and chosen <= waiting
            newest = group.number
            if had_state:
                assert group.workers[0].number in had_state
            assert len({w.slot for w in group.workers}) == len(group.workers)
            by_host = [w.slot.host for w in group.workers]
            assert len(set(by_host)) == sum(a != b for a, b in zip(["", *by_host], by_host, strict=False))
        slots = [w.slot for w in job.membership.workers.values()]
        slots += job.membership.find_free_slots()
        assert len(set(slots)) == len(slots)
        job.start_workers()
        if job.membership.failure:
            assert "with the state of the job" in job.membership.failure
            return
    assert newest > 3


def test_the_timeout_restarts_when_no_process_waits():
    job = Job("a:3", timeout_secs=60)
    job.start_first_group()
    job.join(0)
    job.lose(0)
    job.form_group()
    job.now_secs += 1000  # the other workers have not joined
    job.join(1)
    assert job.membership.find_overdue_members() == []


def test_a_new_process_always_synchronizes():
    job = Job("a:1", initial=1)
    job.start_first_group()
    job.set_hosts("a:2")
    (new,) = job.start_workers()
    job.join(new, skips_sync=True)
    assert job.join(0, skips_sync=True) == [0, new] and job.must_sync
