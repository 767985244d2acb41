"""Membership of an elastic job: processes are added and removed, and form a sequence of groups.

    membership = Membership(limits, HostHealth())
    number = membership.add_worker(membership.find_free_slots()[0])
    membership.set_waiting(number, port=40214, skips_sync=False)
    membership.form_group()               -> a Group once all its members wait, else None

A process starts, waits for a group, is a member of one, and waits again if the group fails. This module
only decides. `ctl.launch.elastic` starts and ends processes, waits, and sends messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ctl.launch.host_health import HostHealth

REMOVED, ADDED = 1, 2  # bit flags of a change


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
      first_group_secs: Time to wait for further processes once enough are waiting for the first group.
      counts_leaving: If True, processes that leave count for `maximum`: their successors start after their
        end. The numbers of replicas are then below `maximum`.
      timeout_name: Option of `timeout_secs`, for messages.
    """

    initial: int
    minimum: int
    maximum: int | None = None
    timeout_secs: float = 600.0
    max_resets: int | None = None
    start_timeout_secs: float | None = None
    first_group_secs: float = 5.0
    counts_leaving: bool = False
    timeout_name: str = "--elastic-timeout"

    def max_starts(self, num_living: int) -> int | None:
        """Returns the number of processes that may start beside living ones. None: no limit."""
        if self.maximum is None or not self.counts_leaving:
            return None
        return max(0, self.maximum - num_living)


@dataclass(frozen=True)
class Slot:
    """A slot for one process: the target of ssh, and the local rank."""

    host: str
    index: int


@dataclass
class Worker:
    """One process that has not ended.

    Attributes:
      replica: Its number, which no other process has. The lowest free one at its start.
      group: Number of its newest group, 0 for none.
      rank: Its rank in that group.
      has_state: True if it has synchronized since its start.
      port: Port of its future listener while it waits, else None.
      skips_sync: True if the process does not require a synchronization of its state.
      is_dismissed: True if the launcher has requested its end. It joins no further group.
    """

    number: int
    slot: Slot
    replica: int = 0
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
    def _min_processes(self) -> int:
        return self.limits.minimum if self.number else self.limits.initial

    @property
    def _is_at_limit(self) -> bool:
        """True if the set of processes may not change again."""
        return bool(self.number) and self._resets == self.limits.max_resets

    def find_free_slots(self) -> list[Slot]:
        """Returns the slots for new processes. There are none until the first group can be filled."""
        is_waiting = not self.number and len(self.select_target_slots()) < self.limits.initial
        if self.is_finishing or self.failure or is_waiting or self._is_at_limit:
            return []
        return self._find_empty_slots()[: self.limits.max_starts(len(self.workers))]

    def _find_empty_slots(self) -> list[Slot]:
        occupied_slots = {w.slot for w in self.workers.values()}
        target_slots = self.select_target_slots()
        return [s for s in target_slots if s not in occupied_slots and self.hosts.can_start(s.host)]

    def add_worker(self, slot: Slot) -> int:
        """Records a new process and returns its number."""
        number, self.num_started = self.num_started, self.num_started + 1
        used = {w.replica for w in self.workers.values()}
        replica = min(set(range(len(used) + 1)) - used)
        self.workers[number] = Worker(number, slot, replica)
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
        has_minimum = len(remaining + new_workers) >= self.limits.minimum
        blocks_successor = self.limits.max_starts(len(self.workers)) == 0 and bool(self._find_empty_slots())
        is_removal = len(remaining) < len(members) and (has_minimum or blocks_successor)
        return (ADDED if new_workers else 0) | (REMOVED if is_removal else 0)

    def find_surplus_workers(self) -> list[Worker]:
        """Returns the workers without a slot, for example because their host is no longer listed.

        If only such workers have the state, they are not included, or with `counts_leaving` one of them.
        """
        target_slots = set(self.select_target_slots())
        surplus = [w for w in self.workers.values() if w.slot not in target_slots]
        remaining = [w for w in self.members if w not in surplus and not w.is_dismissed]
        if self.had_state and not any(w.has_state for w in remaining):
            holders = [w for w in surplus if w.has_state]
            if self.limits.counts_leaving:
                holders = [w for w in holders if not w.is_dismissed][:1]
            surplus = [w for w in surplus if w not in holders]
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
        overdue = find_absent_members(self)
        if overdue:
            self._waiting_since_secs = None
            return overdue
        num_waiting = sum(1 for w in self.workers.values() if w.port)
        self.failure = self.failure or (
            f"{num_waiting} processes are waiting after {waited_secs:.0f} s; the job requires "
            f"{self._min_processes} ({self.limits.timeout_name})"
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
        return is_complete or now_secs - self._enough_since_secs >= self.limits.first_group_secs

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
        started_slots = {w.slot for w in self.workers.values()}
        occupied_slots = {w.slot for w in self.workers.values() if w.group or not self.number}
        can_start = {host.target: self.hosts.can_start(host.target) for host in self.hosts.hosts}
        slots.sort(  # stable
            key=lambda s: (s not in occupied_slots, s not in started_slots, not can_start[s.host])
        )
        return slots[: self.limits.maximum]


def find_leaving_workers(membership: Membership) -> list[Worker]:
    """Returns the surplus workers to dismiss: those outside the group, and those that it cannot use.

    With `counts_leaving`, a group below the minimum waits for the successor of a surplus member.
    """
    is_stuck = membership.limits.counts_leaving and all(w.port for w in membership.members)
    surplus = [w for w in membership.find_surplus_workers() if not w.is_dismissed]
    return [w for w in surplus if is_stuck or w not in membership.members]


def find_absent_members(membership: Membership) -> list[Worker]:
    """Returns the members that do not wait for the next group although another member does."""
    return [w for w in membership.members if not w.port] if membership.is_forming else []


def _order_by_rank(workers: Sequence[Worker]) -> list[Worker]:
    """Returns the workers in order: the oldest with state first, grouped by host."""
    age = {w.slot.host: (True, w.number) for w in workers}
    for worker in workers:
        age[worker.slot.host] = min(age[worker.slot.host], (not worker.has_state, worker.number))
    return sorted(workers, key=lambda w: (age[w.slot.host], not w.has_state, w.number))
