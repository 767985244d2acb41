"""Random histories of an elastic job: arrivals, departures, delayed and duplicated messages.

The state table is in docs/decisions/0052-elastic-training.md.
"""

import dataclasses
from collections import deque

from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import Host
from ctl.launch.membership import Limits, Membership, find_leaving_workers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

TIMEOUT_SECS, COOLDOWN_SECS = 100.0, (0.5, 5.0)
STARTING, WAITING, MEMBER = "starting", "waiting", "member"
MAX_HOSTS, MAX_SLOTS = 3, 3
MAX_POLLS = 60  # of 6 s each
host_slots = st.lists(st.integers(0, MAX_SLOTS), min_size=MAX_HOSTS, max_size=MAX_HOSTS)


@dataclasses.dataclass
class Process:
    """A worker as its program sees itself.

    Attributes:
      messages: Messages to the launcher that are under way, in order.
      group: Number of its newest group, 0 for none.
      sent: All messages that may arrive again.
    """

    number: int
    state: str = STARTING
    group: int = 0
    must_join: bool = True
    messages: deque = dataclasses.field(default_factory=deque)
    sent: list = dataclasses.field(default_factory=list)

    def send(self, *message):
        self.messages.append(message)
        self.sent.append(message)


class Histories(RuleBasedStateMachine):
    """A `Membership` with simulated processes, hosts, a clock, and a network."""

    @initialize(
        slots=host_slots,
        counts=st.lists(st.integers(1, 6), min_size=3, max_size=3).map(sorted),
        counts_leaving=st.booleans(),
    )
    def begin(self, slots, counts, counts_leaving):
        self.now_secs = 0.0
        self.health = HostHealth(COOLDOWN_SECS, clock=lambda: self.now_secs)
        minimum, initial, maximum = counts
        self.limits = Limits(
            initial=initial,
            minimum=minimum,
            maximum=maximum,
            timeout_secs=TIMEOUT_SECS,
            counts_leaving=counts_leaving,
        )
        self.membership = Membership(self.limits, self.health)
        self.processes: dict[int, Process] = {}
        self.ended: list[Process] = []
        self.change_hosts(slots)

    @rule(slots=host_slots)
    def change_hosts(self, slots):
        self.health.update([Host(f"host{i}", count) for i, count in enumerate(slots) if count])

    @rule()
    def start_processes(self):
        for slot in self.membership.find_free_slots():
            assert slot not in [worker.slot for worker in self.membership.workers.values()]
            number = self.membership.add_worker(slot)
            self.processes[number] = Process(number)

    @rule(secs=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
    def pass_time(self, secs):
        self.now_secs += secs

    def choose(self, data, processes):
        return data.draw(st.sampled_from(sorted(processes, key=lambda process: process.number)))

    @precondition(lambda self: any(p.state != WAITING for p in self.processes.values()))
    @rule(data=st.data())
    def request_a_rank(self, data):
        """A process has started, or its connection to a peer has ended."""
        self.join(self.choose(data, [p for p in self.processes.values() if p.state != WAITING]))

    def join(self, process):
        process.state, process.must_join = WAITING, False
        process.send("join", process.group)

    @precondition(lambda self: any(p.state == MEMBER for p in self.processes.values()))
    @rule(data=st.data())
    def synchronize(self, data):
        self.choose(data, [p for p in self.processes.values() if p.state == MEMBER]).send("synced")

    @precondition(lambda self: any(p.state == MEMBER for p in self.processes.values()))
    @rule(data=st.data())
    def fail_to_connect(self, data):
        process = self.choose(data, [p for p in self.processes.values() if p.state == MEMBER])
        process.send("unmet", process.group)
        self.join(process)

    @precondition(lambda self: any(p.messages for p in self.processes.values()))
    @rule(data=st.data(), count=st.integers(1, 3))
    def deliver(self, data, count):
        process = self.choose(data, [p for p in self.processes.values() if p.messages])
        for _ in range(min(count, len(process.messages))):
            self.receive(process.number, process.messages.popleft())

    @precondition(lambda self: any(p.sent for p in [*self.processes.values(), *self.ended]))
    @rule(data=st.data())
    def deliver_again(self, data):
        """A message that has arrived arrives again, possibly after the end of its process."""
        process = self.choose(data, [p for p in [*self.processes.values(), *self.ended] if p.sent])
        arrived = process.sent[: len(process.sent) - len(process.messages)]
        if arrived:
            self.receive(process.number, data.draw(st.sampled_from(arrived)))

    def receive(self, number, message):
        kind, *values = message
        if kind == "join":
            self.membership.set_waiting(number, 1000 + number, group=values[0])
        elif kind == "synced":
            self.membership.record_sync(number)
        elif self.membership.record_connect_failure(number, values[0]):
            self.notify_members()

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def lose(self, data):
        self.end(self.choose(data, self.processes.values()).number)

    def end(self, number):
        process = self.processes.pop(number)
        self.ended.append(process)
        worker = self.membership.remove_worker(number, is_success=False)
        if self.health.is_listed(worker.slot.host):
            self.health.record_failure(worker.slot.host)
        if worker.group == self.membership.number:
            self.notify_members()

    def notify_members(self):
        """The remaining members of the newest group must join the next one."""
        for worker in self.membership.members:
            process = self.processes[worker.number]
            process.must_join |= process.state == MEMBER

    @rule()
    def work_without_faults(self):
        """All processes start, request ranks, synchronize, or end, and all messages arrive."""
        self.start_processes()
        for process in self.processes.values():
            if process.must_join and process.state != WAITING:
                self.join(process)
            elif process.state == MEMBER and not self.membership.workers[process.number].has_state:
                process.send("synced")
            while process.messages:
                self.receive(process.number, process.messages.popleft())
        self.pass_time(6.0)
        self.poll()
        for worker in [w for w in self.membership.workers.values() if w.is_dismissed]:
            self.end(worker.number)

    @rule()
    def poll(self):
        """One turn of the loop of the launcher."""
        before = {worker.number for worker in self.membership.members}
        number, failed = self.membership.number, bool(self.membership.failure)
        group = self.membership.form_group()
        if group is not None:
            assert not failed and group.number == self.membership.number == number + 1
            self.check_group(group, before)
        if "the state of the job has ended" in self.membership.failure:
            assert not any(worker.has_state for worker in self.membership.workers.values())
        for worker in self.membership.find_overdue_members():
            self.end(worker.number)
        for worker in find_leaving_workers(self.membership):
            self.membership.dismiss(worker.number)
        if self.membership.find_change():
            self.notify_members()
        if self.membership.number and not self.membership.members:  # as `ElasticJob` decides
            self.membership.failure = self.membership.failure or "no process is running"

    def check_group(self, group, previous_members):
        numbers = [worker.number for worker in group.workers]
        assert [worker.rank for worker in group.workers] == list(range(len(numbers)))
        assert len({worker.slot for worker in group.workers}) == len(numbers)
        least = self.limits.minimum if group.number > 1 else self.limits.initial
        target_slots = self.membership.select_target_slots()
        num_leaving = sum(worker.slot not in target_slots for worker in group.workers)  # pass the state on
        assert least <= len(numbers) <= self.limits.maximum + num_leaving
        for number in numbers:
            process = self.processes[number]  # it lives
            assert process.state == WAITING, f"process {number} has not requested a rank"
            process.state, process.group = MEMBER, group.number
        for number in previous_members & self.processes.keys():
            worker = self.membership.workers[number]
            assert number in numbers or worker.slot not in target_slots or worker.is_dismissed
        if any(worker.has_state for worker in group.workers):
            assert group.workers[0].has_state, "rank 0 has no state"
        else:
            assert not self.membership.had_state, "the state is lost"

    @invariant()
    def workers_are_the_living_processes(self):
        if hasattr(self, "processes"):
            assert self.membership.workers.keys() == self.processes.keys()

    @invariant()
    def replicas_have_different_numbers(self):
        if hasattr(self, "processes"):
            numbers = [worker.replica for worker in self.membership.workers.values()]
            assert len({*numbers}) == len(numbers)
            assert not self.limits.counts_leaving or max(numbers, default=0) < self.limits.maximum

    def teardown(self):
        """Without further faults all processes form a group, or the job ends with a reason."""
        if not hasattr(self, "processes"):
            return
        for _ in range(MAX_POLLS):
            if self.membership.failure or self.is_at_rest():
                break
            self.work_without_faults()
        assert self.membership.failure or self.is_at_rest()

    def is_at_rest(self):
        """Returns True if all processes are in one group that will not change."""
        membership, processes = self.membership, self.processes.values()
        return (
            {worker.number for worker in membership.members} == self.processes.keys() != set()
            and not (membership.is_forming or membership.find_change() or membership.find_free_slots())
            and all(p.state == MEMBER and not (p.messages or p.must_join) for p in processes)
        )


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=60, deadline=None)
