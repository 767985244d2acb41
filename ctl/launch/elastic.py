"""Elastic jobs, which add and remove processes by decisions of `ctl.launch.membership`.

    exit_code = ElasticJob(job, limits, HostHealth(), HostPoller(script)).run()

A process that dies is replaced while the remaining processes continue without it. New hosts get processes.
Processes on hosts that are no longer listed leave.
"""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctl.collectives import ranks
from ctl.collectives.ranks import Ranks
from ctl.distribute.topology import Topology
from ctl.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ctl.launch.discovery import HostSource
from ctl.launch.horovodrun_options import report
from ctl.launch.hosts import LOOPBACK, Host, format_hosts, reachable
from ctl.launch.membership import ADDED, Group, HostHealth, Limits, Membership, Slot, Worker
from ctl.launch.monitor import PassedOnSignals
from ctl.launch.process import ProcessExit
from ctl.launch.rank_job import FAILURE_GRACE_SECS, SIGNAL_GRACE_SECS, RankJob, describe_end
from ctl.launch.restart_policy import OUTSIDE, REFUSED
from ctl.launch.worker_channels import WorkerChannels

_STEP_SECS = 0.05
_REPEAT_SECS = 1.0  # between two messages about the same change
_LEAVE_SECS = 60.0  # for members without a slot, to leave voluntarily


class ElasticJob:
    """One elastic job, from its first process to its last.

    Attributes:
      done: (rank, number) of the successful processes, in the order of their ends.
    """

    def __init__(
        self,
        job: RankJob,
        limits: Limits,
        hosts: HostHealth,
        source: HostSource,
        *,
        nics: str | None = None,
        listens_at: str = "0.0.0.0",
    ):
        """Starts to listen.

        Args:
          job: Command and environment of the processes.
          limits: Limits of the number of processes.
          hosts: Hosts and their failures.
          source: Source of host lists.
          nics: Names of network interfaces, separated by commas.
          listens_at: An address of this machine.
        """
        self.done: list[tuple[int, int]] = []
        self._job = job
        self._hosts = hosts
        self._source = source
        self._nics = nics
        self._membership = Membership(limits, hosts)
        self._channels = WorkerChannels(job.private["CTL_HVD_SECRET"], listens_at)
        self._heartbeats = job.heartbeats()
        self._change_sent_secs = -math.inf
        self._leave_secs: dict[int, float] = {}  # worker -> deadline for its end
        self._first_cause: ProcessExit | None = None
        self._newest_outage: ProcessExit | None = None  # of a host, which is retried
        self._late_failure: ProcessExit | None = None  # after the first successful end
        self._problem = ""

    def run(self) -> int:
        """Runs until the job is complete or cannot continue. Returns its exit code."""
        with PassedOnSignals() as signals:
            self._group = self._job.process_group()
            self._job.output.start()
            try:
                while not signals.received and not self._membership.failure and self._goes_on():
                    self._step()
                    time.sleep(_STEP_SECS)
                if failure := self._membership.failure:
                    for number in self._membership.workers:
                        self._channels.send(number, {"failure": failure})
                failed = failure or self._late_failure or not signals.received
                self._group.end(
                    FAILURE_GRACE_SECS if failed else SIGNAL_GRACE_SECS,
                    signals.received[0] if signals.received else signal.SIGTERM,
                    hurry=signals.impatient,
                )
            except BaseException:
                self._group.end(0.0)
                raise
            finally:
                self._heartbeats.close()
                self._source.stop()
                self._channels.close()
        return self._exit_code(signals)

    def _goes_on(self) -> bool:
        membership = self._membership
        left = membership.members if membership.number else list(membership.workers)
        if membership.is_finishing:
            return bool(left)
        if not left and (self._first_cause or membership.number):
            membership.failure = "no process is left"
        return not membership.failure

    def _step(self) -> None:
        self._update_hosts()
        for number, message in self._channels.events():
            self._receive(number, message)
        for end in self._group.poll():
            self._handle_exit(end)
        hang = self._heartbeats.find_hang(self._group)
        if hang:
            report(f"process {hang.task.task_index} {hang.why}; it is killed")
            self._kill(hang.task.task_index)
        group = self._membership.group()
        if group:
            self._place(group)
        for worker in self._membership.late():
            report(f"process {worker.number} did not come to the new group in time; it is killed")
            self._kill(worker.number)
        self._dismiss()
        self._send_change()
        for slot in self._membership.free_slots():
            self._start(slot)

    def _kill(self, number: int) -> None:
        self._group.send(_task(number), signal.SIGKILL)

    def _update_hosts(self) -> None:
        found = self._source.newest()
        if found is None:
            return
        if found.problem:
            if found.is_broken and not self._hosts.hosts:
                raise UsageError(f"--host-discovery-script: {found.problem}")
            if found.problem != self._problem:
                report(f"{found.problem}; the hosts known so far stay")
        elif self._hosts.update(found.hosts):
            report(f"hosts: {format_hosts(self._hosts.hosts)}")
            if self._membership.free_slots():  # members continue until processes wait in the new slots
                self._send_to_members({"notice": ADDED, "time": time.time()})
        self._problem = found.problem

    def _receive(self, number: int, message: Mapping[str, Any]) -> None:
        if "join" in message:
            port = message["join"]
            if isinstance(port, int):
                skips_sync = message.get("skips_sync") is True
                self._membership.joined(number, port, skips_sync=skips_sync)
                if number in self._membership.workers:
                    self._hosts.reached(self._membership.workers[number].slot.host)
        elif "synced" in message:
            self._membership.synced(number)
        elif "unmet" in message:
            self._form_again(number, message["unmet"], str(message.get("why")))
        elif "gone" in message:
            self._membership.joined(number, None)

    def _form_again(self, number: int, group: int, why: str) -> None:
        """Dissolves a group in which a process cannot connect to its peers. They form the next group."""
        worker = self._membership.unmet(number, group)
        if worker is None:
            return
        report(f"process {number} could not meet the others of group {group}, which is formed again")
        self._send_to_members({"lost": worker.rank, "why": why}, besides=worker)

    def _start(self, slot: Slot) -> None:
        host = Host(slot.host)
        remote = None if host.is_local else slot.host
        try:
            here = reachable([Host("localhost"), host], self._nics)[0] if remote else LOOPBACK
        except UsageError as e:
            report(f"{e}; {self._hosts.unreachable(slot.host)}")
            return
        place = _planned(self._membership.wanted_slots(), slot)
        environ = self._job.environ_of(place, host.address, is_here=remote is None)
        number = self._membership.started(slot)
        environ |= {
            "HOROVOD_ELASTIC": "1",
            "CTL_HVD_RENDEZVOUS": f"{here}:{self._channels.port}",
            "CTL_HVD_WORKER": str(number),
        }
        if self._job.is_verbose or self._membership.number:
            report(f"process {number} is started on {host.address}, local rank {slot.index}")
        self._job.start(self._group, self._heartbeats, _task(number), environ, remote)

    def _handle_exit(self, end: ProcessExit) -> None:
        number, membership = end.task.task_index, self._membership
        self._heartbeats.release(end.task)
        worker = membership.ended(number, is_success=end.returncode == 0)
        self._leave_secs.pop(number, None)
        if end.returncode == 0 and not worker.is_dismissed:
            self.done.append((worker.rank, number))
        if worker.is_dismissed and worker.group == membership.number:
            self._send_to_members({"lost": worker.rank})  # it did not leave before the next group
        if end.returncode == 0 or worker.is_dismissed:
            return
        host = worker.slot.host
        after = "its host is not named any more"
        if self._hosts.is_named(host):
            after = self._note_failure(host, end)
        report(f"process {number} on {host} {describe_end(end)}; {after}")
        if end.loss == OUTSIDE:
            self._newest_outage = end
        else:
            self._first_cause = self._first_cause or end
        if membership.is_finishing and worker.group:
            self._late_failure = self._late_failure or end
        if worker.group == membership.number:
            self._send_to_members({"lost": worker.rank})  # they may wait for it in vain

    def _note_failure(self, host: str, end: ProcessExit) -> str:
        """Returns a clause with the next use of the host. An error of ssh is not one of the program."""
        if end.loss == OUTSIDE:
            return self._hosts.unreachable(host)
        return self._hosts.exclude(host) if end.loss == REFUSED else self._hosts.failed(host)

    def _place(self, group: Group) -> None:
        """Sends each worker its rank."""
        self._change_sent_secs = -math.inf
        hosts = list(dict.fromkeys(w.slot.host for w in group.workers))
        slots = {h: [w.slot.index for w in group.workers if w.slot.host == h] for h in hosts}
        try:
            names = reachable([Host(h) for h in hosts], self._nics)
        except UsageError as e:
            self._membership.failure = str(e)
            return
        address = dict(zip(hosts, names, strict=True))
        listed = [
            f"{address[w.slot.host]}:{port}" for w, port in zip(group.workers, group.ports, strict=True)
        ]
        for rank, worker in enumerate(group.workers):
            host, index = worker.slot.host, worker.slot.index
            wide = [h for h in hosts if index in slots[h]]
            place = {
                "rank": rank,
                "size": len(listed),
                "local_rank": index,
                "local_size": len(slots[host]),
                "cross_rank": wide.index(host),
                "cross_size": len(wide),
                "addresses": listed,
                "generation": group.number,
                "is_homogeneous": len({len(s) for s in slots.values()}) == 1,
            }
            message = {"place": place, "must_sync": group.must_sync}
            if not self._channels.send(worker.number, message):
                self._membership.joined(worker.number, None)
        numbers = ", ".join(str(w.number) for w in group.workers)
        report(f"group {group.number}: {len(listed)} ranks, by rank the processes {numbers}")

    def _dismiss(self) -> None:
        """Requests workers without a slot to leave, and kills those that do not leave in time."""
        now = time.monotonic()
        unwanted = self._membership.unwanted()
        for worker in unwanted:
            if worker in self._membership.members or worker.is_dismissed:
                continue
            self._membership.dismiss(worker.number)
            self._leave_secs[worker.number] = now + FAILURE_GRACE_SECS
            report(f"process {worker.number} on {worker.slot.host} is not needed any more; it leaves")
            if not self._channels.send(worker.number, {"leave": True}):
                self._group.send(_task(worker.number), signal.SIGTERM)
        for number, until_secs in list(self._leave_secs.items()):
            worker = self._membership.workers[number]
            if not worker.is_dismissed and worker not in unwanted:  # its host is available again
                del self._leave_secs[number]
            elif now >= until_secs:
                self._membership.dismiss(number)
                self._kill(number)

    def _send_change(self) -> None:
        """Repeats the notification of waiting or unwanted workers until the next group forms."""
        now = time.monotonic()
        change = self._membership.change() if now >= self._change_sent_secs + _REPEAT_SECS else 0
        if change:
            self._change_sent_secs = now
            self._send_to_members({"change": change, "time": time.time()})
            for worker in self._membership.unwanted():
                if worker in self._membership.members:
                    self._leave_secs.setdefault(worker.number, now + _LEAVE_SECS)

    def _send_to_members(self, message: Mapping[str, Any], besides: Worker | None = None) -> None:
        for member in self._membership.members:
            if member is not besides:
                told = {**message, "group": self._membership.number}
                self._channels.send(member.number, told)

    def _exit_code(self, signals: PassedOnSignals) -> int:
        late = self._late_failure
        cause = late or self._first_cause or self._newest_outage
        if signals.received:
            report("ended by " + signal.Signals(signals.received[0]).name)
            return 128 + signals.received[0]
        if self._membership.failure:
            report(f"the job ends: {self._membership.failure}")
            if cause:
                number = cause.task.task_index
                report(f"process {number} {describe_end(cause)} (it was the first to)")
            return cause.exit_code if cause else EXIT_FAILED
        if late:
            report(f"process {late.task.task_index} {describe_end(late)}")
            return late.exit_code
        return EXIT_DONE


def _task(number: int) -> Topology:
    return Topology({}, "worker", number)


def _planned(slots: Sequence[Slot], own: Slot) -> Ranks:
    """Returns the expected ranks of a process if all other processes start as planned."""
    slots = [*slots, *([] if own in slots else [own])]
    place = ranks.build_ranks([f"{slot.host}:{slot.index}" for slot in slots], slots.index(own))
    return replace(place, local_rank=own.index)
