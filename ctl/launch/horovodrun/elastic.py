"""Runs a job whose processes may come and go: `ctl.launch.horovodrun.membership` decides, this does it.

    exit_code = Driver(job, limits, machines, lookout).run()

A process that dies is replaced while the others go on without it; new hosts get processes, and those of
hosts that are not named any more leave.
"""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from ctl.collectives import placement
from ctl.collectives.placement import Placement
from ctl.distribute.cluster import Cluster
from ctl.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ctl.launch import hosts as host_lists
from ctl.launch.discovery import Found
from ctl.launch.horovodrun.console import say
from ctl.launch.horovodrun.environment import of_gpu, of_place
from ctl.launch.horovodrun.heartbeats import Heartbeats
from ctl.launch.horovodrun.host_allocation import reachable
from ctl.launch.horovodrun.jobs import FAILED_SECS, GRACE_SECS, Job, how
from ctl.launch.horovodrun.machines import Machines
from ctl.launch.horovodrun.membership import ADDED, Group, Limits, Roster, Seat, Worker
from ctl.launch.horovodrun.ranks import Ranks
from ctl.launch.horovodrun.service import Service
from ctl.launch.hosts import Host
from ctl.launch.layout import LOOPBACK
from ctl.launch.monitor import PassedOnSignals
from ctl.launch.processes import Exit

_POLL_SECS = 0.05
_TELL_SECS = 1.0  # between two times that a group is told of the same change
_LEAVE_SECS = 60.0  # for those that are not wanted any more, to leave by themselves
_NEVER = -math.inf


class Finder(Protocol):
    """Who knows the hosts."""

    def newest(self) -> Found | None:
        """What is new since the last call."""

    def stop(self) -> None:
        """Nobody asks any more."""


class Driver:
    """One elastic job, from its first process to its last.

    Attributes:
      done: (rank, number) of the processes that were done, in the order of their ends.
    """

    def __init__(
        self, job: Job, limits: Limits, machines: Machines, finder: Finder, *,
        nics: str | None = None, listens_at: str = "0.0.0.0",
    ):  # fmt: skip
        """Keeps, and begins to listen.

        Args:
          nics: network interfaces, names with commas; listens_at: an address of this machine.
        """
        self.done: list[tuple[int, int]] = []
        self._job = job
        self._machines = machines
        self._finder = finder
        self._nics = nics
        self._roster = Roster(limits, machines)
        self._service = Service(job.private["CTL_HVD_SECRET"], listens_at)
        self._beats = Heartbeats(job.heartbeat_timeout_secs)
        self._told_secs = _NEVER  # when the group was told of a change last
        self._leave_secs: dict[int, float] = {}  # worker -> when it has to be gone
        self._first_cause: Exit | None = None
        self._late_failure: Exit | None = None  # after another was done
        self._problem = ""

    def run(self) -> int:
        """Until the job is done or cannot go on; returns its exit code."""
        with PassedOnSignals() as signals:
            ranks = Ranks(self._job.command, self._job.output, door=self._job.door)
            self._job.output.start()
            try:
                while not signals.received and not self._roster.failure and self._goes_on():
                    self._step(ranks)
                    time.sleep(_POLL_SECS)
                self._tell_failure()
                failed = self._roster.failure or self._late_failure
                ranks.end(
                    FAILED_SECS if failed or not signals.received else GRACE_SECS,
                    signals.received[0] if signals.received else signal.SIGTERM,
                    hurry=signals.impatient,
                )
            except BaseException:
                ranks.end(0.0)
                raise
            finally:
                self._beats.close()
                self._finder.stop()
                self._service.close()
        return self._conclude(signals)

    def _goes_on(self) -> bool:
        roster = self._roster
        left = roster.members if roster.number else roster.workers
        if roster.is_finishing:
            return bool(left)
        if self._first_cause and not left:
            roster.failure = "no process is left"
        return not roster.failure

    def _step(self, ranks: Ranks) -> None:
        self._find()
        for number, message in self._service.events():
            self._hear(number, message)
        for end in ranks.poll():
            self._ended(end)
        hang = self._beats.hung(ranks)
        if hang:
            say(f"process {hang.task.task_index} {hang.why}; it is killed")
            ranks.send(hang.task.task_index, signal.SIGKILL)
        group = self._roster.group()
        if group:
            self._place(group)
        for worker in self._roster.late():
            say(f"process {worker.number} did not come to the new group in time; it is killed")
            ranks.send(worker.number, signal.SIGKILL)
        self._dismiss(ranks)
        self._tell_change()
        for seat in self._roster.free_seats():
            self._start(ranks, seat)

    def _find(self) -> None:
        found = self._finder.newest()
        if found is None:
            return
        if found.problem:
            if found.is_broken and not self._machines.hosts:
                raise UsageError(f"--host-discovery-script: {found.problem}")
            if found.problem != self._problem:
                say(f"{found.problem}; the hosts known so far stay")
        elif self._machines.are(found.hosts):
            say(f"hosts: {host_lists.tell(self._machines.hosts)}")
            self._announce()
        self._problem = found.problem

    def _hear(self, number: int, message: Mapping) -> None:
        if "join" in message:
            port = message["join"]
            if isinstance(port, int):
                self._roster.joined(number, port, skips_sync=message.get("skips_sync") is True)
        elif "synced" in message:
            self._roster.synced(number)
        elif "unmet" in message:
            self._give_up(number, message)
        elif "gone" in message:
            self._roster.joined(number, None)

    def _give_up(self, number: int, message: Mapping) -> None:
        """The others of a group that one cannot meet do not wait for it, and form the next one."""
        group, why = message["unmet"], str(message.get("why"))
        worker = self._roster.unmet(number, group)
        if worker is None:
            return
        say(f"process {number} could not meet the others of group {group}, which is formed again")
        for member in self._roster.members:
            if member is not worker:
                self._service.send(member.number, {"lost": worker.rank, "group": group, "why": why})

    def _start(self, ranks: Ranks, seat: Seat) -> None:
        host = Host(seat.host)
        far = None if host.is_local else seat.host
        try:
            here = LOOPBACK if far is None else reachable([Host("localhost"), host], self._nics)[0]
        except UsageError as e:
            say(f"{e}; {self._machines.failed(seat.host)}")
            return
        number = self._roster.started(seat)
        environ = {
            **self._job.told,
            "HOROVOD_ELASTIC": "1",
            **of_place(_planned(self._roster.wanted(), seat), host.address),
            "HOROVOD_LOCAL_RANK": str(seat.slot),
            "CTL_HVD_RENDEZVOUS": f"{here}:{self._service.port}",
            "CTL_HVD_WORKER": str(number),
        }
        if self._job.binds_gpus:
            environ["CUDA_VISIBLE_DEVICES"] = of_gpu(seat.slot, is_here=far is None)
        if self._job.says or self._roster.number:
            say(f"process {number} is started on {host.address}, local rank {seat.slot}")
        private = {**(self._job.far if far else {}), **self._job.private}
        task = Cluster({}, "worker", number)
        environ |= {} if far else self._beats.told(task)
        ranks.start(task, environ, private=private, host=far)

    def _ended(self, end: Exit) -> None:
        number = end.task.task_index
        worker = self._roster.ended(number, is_success=end.returncode == 0)
        self._leave_secs.pop(number, None)
        if end.returncode == 0 and not worker.is_dismissed:
            self.done.append((worker.rank, number))
        if end.returncode == 0 or worker.is_dismissed:
            return
        named = any(h.target == worker.seat.host for h in self._machines.hosts)
        after = (
            self._machines.failed(worker.seat.host) if named else "its host is not named any more"
        )
        say(f"process {number} on {worker.seat.host} {how(end)}; {after}")
        self._first_cause = self._first_cause or end
        if self._roster.is_finishing and worker.group:
            self._late_failure = self._late_failure or end
        for member in self._roster.members if worker.group == self._roster.number else ():
            told = {"lost": worker.rank, "group": worker.group}  # it may wait for it in vain
            self._service.send(member.number, told)

    def _place(self, group: Group) -> None:
        """Tells each worker its rank."""
        self._told_secs = _NEVER
        hosts = list(dict.fromkeys(w.seat.host for w in group.workers))
        slots = {h: [w.seat.slot for w in group.workers if w.seat.host == h] for h in hosts}
        try:
            names = reachable([Host(h) for h in hosts], self._nics)
        except UsageError as e:
            self._roster.failure = str(e)
            return
        address = dict(zip(hosts, names, strict=True))
        listed = [
            f"{address[w.seat.host]}:{port}"
            for w, port in zip(group.workers, group.ports, strict=True)
        ]
        for rank, worker in enumerate(group.workers):
            host, slot = worker.seat.host, worker.seat.slot
            wide = [h for h in hosts if slot in slots[h]]
            place = {
                "rank": rank, "size": len(listed), "local_rank": slot,
                "local_size": len(slots[host]), "cross_rank": wide.index(host),
                "cross_size": len(wide), "addresses": listed, "generation": group.number,
                "is_homogeneous": len({len(s) for s in slots.values()}) == 1,
            }  # fmt: skip
            told = {"place": place, "must_sync": group.must_sync}
            if not self._service.send(worker.number, told):
                self._roster.joined(worker.number, None)
        numbers = ", ".join(str(w.number) for w in group.workers)
        say(f"group {group.number}: {len(listed)} ranks, by rank the processes {numbers}")

    def _dismiss(self, ranks: Ranks) -> None:
        """Those without a seat leave; who is in a group at work may take a while."""
        now = time.monotonic()
        for worker in self._roster.unwanted():
            if worker in self._roster.members or worker.is_dismissed:
                continue
            worker.is_dismissed = True
            self._leave_secs[worker.number] = now + FAILED_SECS
            say(f"process {worker.number} on {worker.seat.host} is not needed any more; it leaves")
            if not self._service.send(worker.number, {"leave": True}):
                ranks.send(worker.number, signal.SIGTERM)
        unwanted = {w.number: w for w in self._roster.unwanted()}
        for number, until_secs in list(self._leave_secs.items()):
            worker = self._roster.workers[number]
            if not worker.is_dismissed and number not in unwanted:  # its host is back
                del self._leave_secs[number]
            elif now >= until_secs:
                worker.is_dismissed = True
                ranks.send(number, signal.SIGKILL)

    def _tell_change(self) -> None:
        """Tells the group at work that others wait or some are to leave, until it has come together."""
        now = time.monotonic()
        if now - self._told_secs < _TELL_SECS:
            return
        change = self._roster.change()
        if change:
            self._told_secs = now
            told = {"change": change, "time": time.time(), "group": self._roster.number}
            for worker in self._roster.members:
                self._service.send(worker.number, told)
            for worker in self._unwanted_members():
                self._leave_secs.setdefault(worker.number, now + _LEAVE_SECS)

    def _unwanted_members(self) -> list[Worker]:
        return [w for w in self._roster.unwanted() if w in self._roster.members]

    def _announce(self) -> None:
        """Tells the group at work of new seats at once; it goes on until processes wait in them."""
        change = ADDED if self._roster.free_seats() else 0
        for worker in self._roster.members if change else ():
            told = {"notice": change, "time": time.time(), "group": self._roster.number}
            self._service.send(worker.number, told)

    def _tell_failure(self) -> None:
        if self._roster.failure:
            for number in self._roster.workers:
                self._service.send(number, {"failure": self._roster.failure})

    def _conclude(self, signals: PassedOnSignals) -> int:
        cause = self._late_failure or self._first_cause
        if signals.received:
            say("ended by " + signal.Signals(signals.received[0]).name)
            return 128 + signals.received[0]
        if self._roster.failure:
            say(f"the job ends: {self._roster.failure}")
            if cause:
                say(f"process {cause.task.task_index} {how(cause)} (it was the first to)")
            return cause.exit_code if cause else EXIT_FAILED
        if self._late_failure:
            say(f"process {self._late_failure.task.task_index} {how(self._late_failure)}")
            return self._late_failure.exit_code
        return EXIT_DONE


def _planned(seats: Sequence[Seat], own: Seat) -> Placement:
    """The place that a process is to have, if all others come as planned."""
    seats = [*seats, *([] if own in seats else [own])]
    return placement.among([f"{seat.host}:{seat.slot}" for seat in seats], seats.index(own))
