"""Membership of an elastic job: processes are added and removed, and form a sequence of groups.

    membership = Membership(limits, HostHealth())
    number = membership.add_worker(membership.find_free_slots()[0])
    membership.set_waiting(number, port=40214, skips_sync=False)
    membership.form_group()               -> a Group once all its members wait, else None

A process starts, waits for a group, is a member of one, and waits again if the group fails. This module
only decides. `ctl.launch.elastic` starts and ends processes, waits, and sends messages.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ctl.launch.hosts import Host
from ctl.launch.restart_policy import LONGEST_DELAY_SECS, RESTART_PAUSE_SECS, exponential_delay_secs

REMOVED, ADDED = 1, 2  # bit flags of a change
_FORGET_SECS = 3600.0  # an older failure does not count
_FIRST_GROUP_SECS = 5.0  # to wait for further processes once enough are waiting for the first group


@dataclass
class HostHealth:
    """Hosts of the newest list, oldest first, with the failures of each.

    Attributes:
      cooldown: Minimum and maximum delay before a host with a failure is used again (seconds). With
        this setting no host is excluded permanently.
    """

    cooldown: tuple[float, float] | None = None
    clock: Callable[[], float] = time.monotonic
    hosts: list[Host] = field(default_factory=list)
    _failures: dict[str, list[float]] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _outages: dict[str, int] = field(default_factory=dict)  # since a process of the host connected

    def update(self, new_hosts: Sequence[Host]) -> bool:
        """Replaces the list, with the previous hosts first. Returns True if it has changed.

        The failures of a removed host are discarded: it may return as another machine with the same name.
        """
        previous_slots = {host.target: host.slots for host in self.hosts}
        new_slots = {host.target: host.slots for host in new_hosts}
        if previous_slots == new_slots:
            return False
        ordered_targets = [t for t in previous_slots if t in new_slots] + [
            t for t in new_slots if t not in previous_slots
        ]
        self.hosts = [Host(target, new_slots[target]) for target in ordered_targets]
        for target in set(previous_slots) - set(new_slots):
            self._failures.pop(target, None)
            self._not_before.pop(target, None)
            self._outages.pop(target, None)
        return True

    def record_failure(self, target: str) -> str:
        """Records a failure of a process. Returns a clause with the time of the next use of the host."""
        now_secs = self.clock()
        recent = [t for t in self._failures.get(target, []) if now_secs - t < _FORGET_SECS]
        self._failures[target] = [*recent, now_secs]
        delay_secs = self._delay_secs(len(recent))
        self._not_before[target] = now_secs + delay_secs
        if delay_secs == math.inf:
            return f"{len(recent) + 1} failures; no further process is started there"
        return f"the next process is started there in {delay_secs:.0f} s at the earliest"

    def record_outage(self, target: str) -> str:
        """Records that ssh could not connect or lost the host. Returns a clause with the time of the retry.

        The processes of a host end together with their connection, which counts once.
        """
        now_secs = self.clock()
        if now_secs >= self._not_before.get(target, -math.inf):
            outages = self._outages.get(target, 0)
            self._outages[target] = outages + 1
            delay_secs = exponential_delay_secs(RESTART_PAUSE_SECS[0], outages, LONGEST_DELAY_SECS)
            self._not_before[target] = now_secs + delay_secs
        return f"retrying the host in {self._not_before[target] - now_secs:.0f} s"

    def record_connection(self, target: str) -> None:
        """Records that a process of the host has connected. The next outage begins with a short pause."""
        self._outages.pop(target, None)

    def exclude(self, target: str) -> str:
        """Records that the host rejects ssh permanently. Returns a clause."""
        self._not_before[target] = math.inf
        return "no further process is started there"

    def is_listed(self, target: str) -> bool:
        """Returns True if the host is on the newest list."""
        return any(host.target == target for host in self.hosts)

    def can_start(self, target: str) -> bool:
        """Returns False during the delay after a failure on the host."""
        return self.clock() >= self._not_before.get(target, -math.inf)

    def _delay_secs(self, failures: int) -> float:
        """Returns the delay after the next failure of a host with this number of failures (seconds)."""
        if self.cooldown is None:
            return RESTART_PAUSE_SECS[failures] if failures < len(RESTART_PAUSE_SECS) else math.inf
        min_secs, max_secs = self.cooldown
        return min(
            max_secs, exponential_delay_secs(min_secs, failures + 1, max_secs) + random.random() * min_secs
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the number of processes, and the timeout for them.

    Attributes:
      initial: Number of processes that the first group requires.
      minimum: Number of processes that the later groups require.
      maximum: Maximum number of processes, None for all slots.
      timeout_secs: Timeout for enough processes.
      max_resets: Maximum number of groups after the first, None for no limit.
      start_timeout_secs: Timeout for the first group. None: `timeout_secs`.
    """

    initial: int
    minimum: int
    maximum: int | None = None
    timeout_secs: float = 600.0
    max_resets: int | None = None
    start_timeout_secs: float | None = None


@dataclass(frozen=True)
class Slot:
    """A slot for one process: the target of ssh, and the local rank."""

    host: str
    index: int


@dataclass
class Worker:
    """One process that has not ended.

    Attributes:
      group: Number of its newest group, 0 for none.
      rank: Its rank in that group.
      has_state: True if it has synchronized since its start.
      port: Port of its future listener while it waits, else None.
      skips_sync: True if the process does not require a synchronization of its state.
      is_dismissed: True if the launcher has requested its end. It joins no further group.
    """

    number: int
    slot: Slot
    group: int = 0
    rank: int = 0
    has_state: bool = False
    port: int | None = None
    skips_sync: bool = False
    is_dismissed: bool = False


@dataclass(frozen=True)
class Group:
    """A set of ranks: workers and their ports, by rank.

    `must_sync`: The ranks have to synchronize their state first.
    """

    number: int
    workers: Sequence[Worker]
    ports: Sequence[int]
    must_sync: bool


@dataclass
class Membership:
    """State of an elastic job: the processes that have not ended, and their groups.

    Attributes:
      number: Number of the newest group, 0 before the first.
      is_finishing: True once a process has succeeded.
      failure: Reason why the job cannot continue, else "".
      num_started: Number of processes that were started, also before a restart.
      had_state: True once a process has had the state of the job.
    """

    limits: Limits
    hosts: HostHealth
    workers: dict[int, Worker] = field(default_factory=dict)
    number: int = 0
    is_finishing: bool = False
    failure: str = ""
    num_started: int = 0
    had_state: bool = False
    _resets: int = 0
    _uncounted_group: int = 0  # the newest group that does not count
    _waiting_since_secs: float | None = None  # start of the wait for a group
    _enough_since_secs: float | None = None  # time at which enough processes waited for the first group

    @property
    def members(self) -> list[Worker]:
        """The remaining workers of the newest group."""
        return [w for w in self.workers.values() if self.number and w.group == self.number]

    @property
    def is_forming(self) -> bool:
        """True while a group has to form: the first one, or the successor of a failed one."""
        return not self.number or any(w.port for w in self.members)

    @property
    def has_lost_state(self) -> bool:
        """True if all processes with the state of the job have ended."""
        return self.had_state and not any(w.has_state for w in self.workers.values())

    @property
    def _min_processes(self) -> int:
        return self.limits.minimum if self.number else self.limits.initial

    @property
    def _is_at_limit(self) -> bool:
        """True if the set of processes may not change again."""
        return bool(self.number) and self._resets == self.limits.max_resets

    def find_free_slots(self) -> list[Slot]:
        """Returns the slots for new processes. There are none until the first group can be filled."""
        occupied_slots = {w.slot for w in self.workers.values()}
        target_slots = self.select_target_slots()
        is_waiting = not self.number and len(target_slots) < self.limits.initial
        if self.is_finishing or self.failure or is_waiting or self._is_at_limit:
            return []
        return [s for s in target_slots if s not in occupied_slots and self.hosts.can_start(s.host)]

    def add_worker(self, slot: Slot) -> int:
        """Records a new process and returns its number."""
        number, self.num_started = self.num_started, self.num_started + 1
        self.workers[number] = Worker(number, slot)
        return number

    def set_waiting(
        self, number: int, port: int | None, *, skips_sync: bool = False, group: int | None = None
    ) -> None:
        """Records that a process waits for the next group, or with `port=None` has lost its connection.

        Args:
          number: Number of the process.
          port: Port of its future listener.
          skips_sync: True if the process does not require a synchronization of its state.
          group: Number of its newest group. A request from before that group is ignored. None: unknown.
        """
        worker = self.workers.get(number)
        if worker is not None and not worker.is_dismissed and group in (None, worker.group):
            worker.port, worker.skips_sync = port, skips_sync

    def dismiss(self, number: int) -> None:
        """Excludes a process from all further groups. Its slot is free after its end."""
        worker = self.workers[number]
        worker.is_dismissed, worker.port = True, None

    def record_sync(self, number: int) -> None:
        """Records that a process has the state of the job."""
        if number in self.workers:
            self.workers[number].has_state = self.had_state = True

    def record_connect_failure(self, number: int, group: int) -> Worker | None:
        """Records that a member could not connect to its peers. The group and its reset do not count.

        Returns the member, or None if there is a newer group.
        """
        worker = self.workers.get(number)
        if worker is None or not worker.group == group == self.number:
            return None
        self._resets -= 0 if self._uncounted_group == group else 1
        self._uncounted_group = group
        return worker

    def remove_worker(self, number: int, *, is_success: bool) -> Worker:
        """Records the end of a process. Returns its last state."""
        worker = self.workers.pop(number)
        if is_success and not worker.is_dismissed:
            self.is_finishing = True
        return worker

    def find_change(self) -> int:
        """Returns the change for the members of a working group: ADDED, REMOVED, both, or 0."""
        if self.is_forming or self.is_finishing:
            return 0
        members, surplus = self.members, self.find_surplus_workers()
        remaining = [w for w in members if w not in surplus]
        new_workers = [] if self._is_at_limit else self._find_new_workers()
        is_removal = len(remaining) < len(members) and len(remaining + new_workers) >= self.limits.minimum
        return (ADDED if new_workers else 0) | (REMOVED if is_removal else 0)

    def find_surplus_workers(self) -> list[Worker]:
        """Returns the workers without a slot, for example because their host is no longer listed.

        If only such workers have the state, they are not included.
        """
        target_slots = set(self.select_target_slots())
        surplus = [w for w in self.workers.values() if w.slot not in target_slots]
        remaining = [w for w in self.members if w not in surplus and not w.is_dismissed]
        if self.had_state and not any(w.has_state for w in remaining):
            surplus = [w for w in surplus if not w.has_state]
        return surplus

    def form_group(self) -> Group | None:
        """Forms the next group if all its workers wait for it. Otherwise returns None."""
        if not self.is_forming or self.failure:
            self._waiting_since_secs = None
            return None
        self._waiting_since_secs = (
            self.hosts.clock() if self._waiting_since_secs is None else self._waiting_since_secs
        )
        if not self._are_all_waiting():
            return None
        surplus = self.find_surplus_workers()
        selected = [w for w in self.members + self._find_new_workers() if w.port and w not in surplus]
        if self.is_finishing:
            selected = [w for w in selected if w.group]
        if len(selected) < self._min_processes:
            if self.is_finishing and self.number:
                self.failure = "some processes have finished, and too few remain to continue"
            return None
        if self.had_state and not any(w.has_state for w in selected):
            self.failure = "every process with the state of the job has ended"
            return None
        if self._is_at_limit:
            self.failure = f"the set of processes changed {self._resets + 1} times (--reset-limit)"
            return None
        return self._build_group(selected)

    def find_overdue_members(self) -> list[Worker]:
        """Returns members that missed the timeout, to be killed. Without such members the job fails."""
        if not self.is_forming or self._waiting_since_secs is None:
            return []
        waited_secs, timeout_secs = self.hosts.clock() - self._waiting_since_secs, self.limits.timeout_secs
        if not self.number and self.limits.start_timeout_secs is not None:
            timeout_secs = self.limits.start_timeout_secs
        if waited_secs < timeout_secs:
            return []
        overdue = [w for w in self.members if not w.port]
        if overdue:
            self._waiting_since_secs = None
            return overdue
        num_waiting = sum(1 for w in self.workers.values() if w.port)
        self.failure = self.failure or (
            f"{num_waiting} processes are waiting after {waited_secs:.0f} s; the job requires "
            f"{self._min_processes} (--elastic-timeout)"
        )
        return []

    def _build_group(self, selected: list[Worker]) -> Group:
        must_sync = not self.number or not all(w.group and w.skips_sync for w in selected)
        self._resets += 1 if self.number else 0
        self.number, self._waiting_since_secs = self.number + 1, None
        ordered_workers = _order_by_rank(selected)
        ports = [w.port or 0 for w in ordered_workers]
        for rank, worker in enumerate(ordered_workers):
            worker.group, worker.rank, worker.port = self.number, rank, None
        return Group(self.number, ordered_workers, ports, must_sync)

    def _are_all_waiting(self) -> bool:
        """Returns True if all workers of the next group wait for it."""
        if self.number:
            return all(w.port for w in self.members)
        now_secs, waiting_workers = self.hosts.clock(), [w for w in self.workers.values() if w.port]
        if len(waiting_workers) < self.limits.initial:
            self._enough_since_secs = None
            return False
        self._enough_since_secs = now_secs if self._enough_since_secs is None else self._enough_since_secs
        is_complete = all(w.port or w.is_dismissed for w in self.workers.values())
        return is_complete or now_secs - self._enough_since_secs >= _FIRST_GROUP_SECS

    def _find_new_workers(self) -> list[Worker]:
        """Returns workers with a slot that wait for their first group."""
        target_slots, group = set(self.select_target_slots()), self.number
        return [
            w
            for w in self.workers.values()
            if w.port and not (group and w.group == group) and w.slot in target_slots
        ]

    def select_target_slots(self) -> list[Slot]:
        """Returns the slots to fill: first the occupied ones, then the hosts in order."""
        slots = [Slot(h.target, i) for h in self.hosts.hosts for i in range(h.slots)]
        occupied_slots = {w.slot for w in self.workers.values() if w.group or not self.number}
        slots.sort(key=lambda s: (s not in occupied_slots, not self.hosts.can_start(s.host)))  # stable
        return slots[: self.limits.maximum]


def _order_by_rank(workers: Sequence[Worker]) -> list[Worker]:
    """Returns the workers in order: the oldest with state first, grouped by host."""
    age = {w.slot.host: (True, w.number) for w in workers}
    for worker in workers:
        age[worker.slot.host] = min(age[worker.slot.host], (not worker.has_state, worker.number))
    return sorted(workers, key=lambda w: (age[w.slot.host], not w.has_state, w.number))
