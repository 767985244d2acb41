"""Who is in an elastic job: processes come and go, and form one group after the other.

    roster = Roster(limits, machines)
    for seat in roster.free_seats():
        number = roster.started(seat)
    roster.joined(number, port=40214, skips_sync=False)
    roster.group()               -> a Group once all that belong to it are here, else None
    roster.synced(number)
    roster.unmet(number, group)
    roster.ended(number, is_success=False)

A process is starting, then waiting for a group, then in one, and waits again when the group has broken.
Nothing here starts, ends, waits or sends: that is `ctl.launch.horovodrun.elastic`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ctl.launch.horovodrun.machines import Machines

REMOVED, ADDED = 1, 2  # what has changed; both may have


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many processes, and how long to wait for them.

    Attributes:
      first: before the job begins; least: to go on; most: ever, None for all slots there are.
      timeout_secs: for enough processes to be there; resets: groups after the first, None for any.
    """

    first: int
    least: int
    most: int | None = None
    timeout_secs: float = 600.0
    resets: int | None = None


@dataclass(frozen=True)
class Seat:
    """Where one process goes: a host as ssh is given it, and the local rank there."""

    host: str
    slot: int


@dataclass
class Worker:
    """One process that has not ended.

    Attributes:
      group, rank: the newest that it was in, 0 for none, and its rank there.
      has_state: it has synced since.
      port: where it will listen, while it waits; else None.
    """

    number: int
    seat: Seat
    group: int = 0
    rank: int = 0
    has_state: bool = False
    port: int | None = None
    skips_sync: bool = False
    is_dismissed: bool = False


@dataclass(frozen=True)
class Group:
    """A set of ranks: workers and the ports they listen on, by rank.

    `must_sync`: they have to share their state first.
    """

    number: int
    workers: Sequence[Worker]
    ports: Sequence[int]
    must_sync: bool


@dataclass
class Roster:
    """Everybody who has not ended, and what may happen next.

    Attributes:
      number: of the newest group, 0 before the first; is_finishing: a process was done.
      failure: why the job cannot go on, in words; "" while it can.
    """

    limits: Limits
    machines: Machines
    workers: dict[int, Worker] = field(default_factory=dict)
    number: int = 0
    is_finishing: bool = False
    failure: str = ""
    _started: int = 0
    _resets: int = 0
    _unmet: int = 0  # the newest group that was none
    _had_state: bool = False
    _since: float | None = None  # when we began to wait for a group

    @property
    def members(self) -> list[Worker]:
        """Those of the newest group that are left."""
        return [w for w in self.workers.values() if self.number and w.group == self.number]

    @property
    def is_forming(self) -> bool:
        """True while a group is to be formed: the first one, or one of a group that broke."""
        return not self.number or any(w.port for w in self.members)

    def free_seats(self) -> list[Seat]:
        """Seats in which a process is to be started; none before there are enough for the first group."""
        taken = {w.seat for w in self.workers.values()}
        wanted = self.wanted()
        if (
            self.is_finishing
            or self.failure
            or (not self.number and len(wanted) < self.limits.first)
        ):
            return []
        if self.number and self._resets == self.limits.resets:
            return []
        return [s for s in wanted if s not in taken and self.machines.may_start(s.host)]

    def started(self, seat: Seat) -> int:
        """Notes a new process; returns its number."""
        number, self._started = self._started, self._started + 1
        self.workers[number] = Worker(number, seat)
        return number

    def joined(self, number: int, port: int | None, *, skips_sync: bool = False) -> None:
        """A process waits for the next group; with None it does not any more, and will end."""
        worker = self.workers.get(number)
        if worker is not None:
            worker.port, worker.skips_sync = port, skips_sync

    def synced(self, number: int) -> None:
        """A process has the state of the job."""
        if number in self.workers:
            self.workers[number].has_state = self._had_state = True

    def unmet(self, number: int, group: int) -> Worker | None:
        """A member of a group could not meet the others, so that it was none, and no reset.

        Returns it, or None when there is a newer group.
        """
        worker = self.workers.get(number)
        if worker is None or not worker.group == group == self.number:
            return None
        self._resets -= 0 if self._unmet == group else 1
        self._unmet = group
        return worker

    def ended(self, number: int, *, is_success: bool) -> Worker:
        """A process has ended; returns what it was."""
        worker = self.workers.pop(number)
        if is_success and not worker.is_dismissed:
            self.is_finishing = True
        return worker

    def change(self) -> int:
        """What the members of a group at work are to be told: ADDED, REMOVED, both, or 0 for nothing."""
        if self.is_forming or self.is_finishing:
            return 0
        members, unwanted = self.members, self.unwanted()
        stay = [w for w in members if w not in unwanted]
        new = [] if self._resets == self.limits.resets else self._newcomers()
        leave = len(stay) < len(members) and len(stay + new) >= self.limits.least
        return (ADDED if new else 0) | (REMOVED if leave else 0)

    def unwanted(self) -> list[Worker]:
        """Those whose seats are no more, as when their host is not named any more.

        None of those with state while they are the only ones.
        """
        wanted = set(self.wanted())
        gone = [w for w in self.workers.values() if w.seat not in wanted]
        stay = [w for w in self.members if w not in gone]
        if self._had_state and not any(w.has_state for w in stay):
            gone = [w for w in gone if not w.has_state]
        return gone

    def group(self) -> Group | None:
        """The next group, if all that belong to it wait for it; its workers are in it from now on."""
        if not self.is_forming or self.failure:
            self._since = None
            return None
        self._since = self.machines.clock() if self._since is None else self._since
        if not self._all_here():
            return None
        unwanted = self.unwanted()
        chosen = [w for w in self.members + self._newcomers() if w.port and w not in unwanted]
        if self.is_finishing:
            chosen = [w for w in chosen if w.group]
        least = self.limits.least if self.number else self.limits.first
        if len(chosen) < least:
            if self.is_finishing and self.number:
                self.failure = "others were done, and too few are left to go on"
            return None
        if self._had_state and not any(w.has_state for w in chosen):
            self.failure = "every process that had the state of the job is gone"
            return None
        if self.number and self._resets == self.limits.resets:
            self.failure = f"the set of processes changed {self._resets + 1} times (--reset-limit)"
            return None
        return self._formed(chosen)

    def late(self) -> list[Worker]:
        """Members that did not come in time, to be killed; without any, waiting in vain is a failure."""
        if not self.is_forming or self._since is None:
            return []
        waited = self.machines.clock() - self._since
        if waited < self.limits.timeout_secs:
            return []
        late = [w for w in self.members if not w.port]
        if late:
            self._since = None
            return late
        waiting = sum(1 for w in self.workers.values() if w.port)
        least = self.limits.least if self.number else self.limits.first
        self.failure = self.failure or (
            f"{waiting} processes are there after {waited:.0f} s, fewer than the {least} that the job "
            "needs (--elastic-timeout)"
        )
        return []

    def _formed(self, chosen: list[Worker]) -> Group:
        must_sync = not self.number or not all(w.group and w.skips_sync for w in chosen)
        self._resets += 1 if self.number else 0
        self.number, self._since = self.number + 1, None
        ordered = _by_rank(chosen)
        ports = [w.port or 0 for w in ordered]
        for rank, worker in enumerate(ordered):
            worker.group, worker.rank, worker.port = self.number, rank, None
        return Group(self.number, ordered, ports, must_sync)

    def _all_here(self) -> bool:
        """Whether nobody that belongs to the next group is still to come."""
        if self.number:
            return all(w.port for w in self.members)
        waited = self.machines.clock() - (self._since or 0.0)
        return waited >= self.limits.timeout_secs or all(w.port for w in self.workers.values())

    def _newcomers(self) -> list[Worker]:
        """Those that wait for their first group and have a seat to keep."""
        wanted = set(self.wanted())
        return [
            w
            for w in self.workers.values()
            if w.port and w not in self.members and w.seat in wanted
        ]

    def wanted(self) -> list[Seat]:
        """The seats to be filled: those that are taken first, then the hosts in their order."""
        seats = [Seat(h.target, slot) for h in self.machines.hosts for slot in range(h.slots)]
        taken = {w.seat for w in self.workers.values() if w.group or not self.number}
        seats.sort(key=lambda s: (s not in taken, not self.machines.may_start(s.host)))  # stable
        return seats[: self.limits.most]


def _by_rank(workers: Sequence[Worker]) -> list[Worker]:
    """The oldest with state first, and those of a host together."""
    age = {w.seat.host: (True, w.number) for w in workers}
    for worker in workers:
        age[worker.seat.host] = min(age[worker.seat.host], (not worker.has_state, worker.number))
    return sorted(workers, key=lambda w: (age[w.seat.host], not w.has_state, w.number))
