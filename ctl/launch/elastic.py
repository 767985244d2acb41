"""Elastic jobs, which add and remove processes by decisions of `ctl.launch.membership`.

    exit_code = ElasticJob(job, limits, HostHealth(), HostPoller(script)).run()

A process that dies is replaced while the remaining processes continue without it. Processes are
started on new hosts, and processes on hosts that are no longer listed exit.
"""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ctl.collectives import ranks
from ctl.collectives.ranks import Ranks
from ctl.distribute.topology import Topology
from ctl.errors import EXIT_DONE, EXIT_FAILED, UsageError
from ctl.launch.discovery import HostSource
from ctl.launch.elastic_restarts import FailurePolicy
from ctl.launch.horovodrun_options import report
from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import LOOPBACK, Host, format_hosts, resolve_addresses
from ctl.launch.membership import (
    ADDED,
    Group,
    Limits,
    Membership,
    Slot,
    Worker,
    find_absent_members,
    find_leaving_workers,
)
from ctl.launch.monitor import ForwardedSignals
from ctl.launch.process import ProcessExit
from ctl.launch.rank_assignment import build_assignments
from ctl.launch.rank_job import FAILURE_GRACE_SECS, RankJob, describe_end
from ctl.launch.restart_policy import OUTSIDE, REFUSED
from ctl.launch.worker_channels import WorkerChannels

LOOP_SECS = 0.05  # between two polls
_REPEAT_SECS = 1.0  # between two messages about the same change
_LEAVE_SECS = 60.0  # for members without a slot to exit before they are killed


class ElasticJob:
    """One elastic job, from its first process to its last.

    Attributes:
      completed_workers: (rank, number) of the successful processes, in the order of their ends.
    """

    def __init__(
        self,
        job: RankJob,
        limits: Limits,
        hosts: HostHealth,
        source: HostSource,
        *,
        resolve: Callable[[Sequence[Host]], list[str]] = resolve_addresses,
        listens_at: str = "0.0.0.0",
        policy: FailurePolicy | None = None,
        report: Callable[[str], object] = report,
    ):
        """Binds the port for connections from the workers.

        Args:
          job: Command and environment of the processes.
          limits: Limits of the number of processes.
          hosts: Hosts and their failures.
          source: Source of host lists.
          resolve: Returns the addresses of hosts, at which their processes can connect to each other.
          listens_at: An address of this machine.
          policy: Decides what follows from a failure. None: that of `ctlrun`.
          report: Prints a message of the launcher.
        """
        self.completed_workers: list[tuple[int, int]] = []
        self._job = job
        self._hosts = hosts
        self._source = source
        self._resolve, self._policy, self._report = resolve, policy or FailurePolicy(), report
        self._limits = limits
        self._membership = Membership(limits, hosts)
        self._channels = WorkerChannels(job.private["CTL_HVD_SECRET"], listens_at)
        self._heartbeats = job.create_heartbeat_monitor()
        self._change_sent_secs = -math.inf
        self._leave_deadlines: dict[int, float] = {}  # worker -> deadline for its end
        self._silent_workers: set[int] = set()  # that were killed
        self._first_cause: ProcessExit | None = None
        self._newest_host_loss: ProcessExit | None = None  # of a host, which is retried
        self._failure_after_success: ProcessExit | None = None  # after the first successful end
        self._reported_problem = ""
        self._is_permanent_failure = False
        self._restart_environ: dict[str, str] = {}

    @property
    def lacks_workers(self) -> bool:
        """True if the job has ended because too few processes were running, which a restart may correct."""
        is_refused = self._first_cause is not None and self._first_cause.loss == REFUSED
        return bool(self._membership.failure) and not (self._is_permanent_failure or is_refused)

    def run(self) -> int:
        """Runs until the job is complete or cannot continue. Returns its exit code."""
        with ForwardedSignals() as signals:
            self._group = self._job.create_process_group()
            self._job.output.start()
            try:
                while not signals.received and (self._can_continue() or self._restart(signals)):
                    self._poll()
                    time.sleep(LOOP_SECS)
                if failure := self._membership.failure:
                    for number in self._membership.workers:
                        self._channels.send(number, {"failure": failure})
                failed = failure or self._failure_after_success or not signals.received
                self._group.end(
                    FAILURE_GRACE_SECS if failed else self._job.grace_secs,
                    signals.received[0] if signals.received else signal.SIGTERM,
                    is_urgent=signals.is_repeated,
                )
            except BaseException:
                self._group.end(0.0)
                raise
            finally:
                self._heartbeats.close()
                self._source.stop()
                self._channels.close()
        return self._exit_code(signals)

    @property
    def _has_members(self) -> bool:
        """True if a process of the newest group, or of the future first one, has not ended."""
        return bool(self._membership.members if self._membership.number else self._membership.workers)

    def _can_continue(self) -> bool:
        membership = self._membership
        if membership.is_finishing:
            return self._has_members
        if not self._has_members and (self._first_cause or membership.number):
            membership.failure = membership.failure or "no process is running"
        return not membership.failure

    def _restart(self, signals: ForwardedSignals) -> bool:
        """Prepares a restart if no process has the state of the job. Returns False if the job ends."""
        membership, cause = self._membership, self._first_cause or self._newest_host_loss
        has_ended = membership.is_finishing or self._is_permanent_failure
        if has_ended or cause is None or (self._has_members and not _has_lost_state(membership)):
            return False
        delay_secs = self._policy.restart_delay_secs(cause, has_trained=membership.had_state)
        if delay_secs is None:
            return False
        running = self._group.running  # without the state, or they have lost their peers
        self._group.end(FAILURE_GRACE_SECS, is_urgent=lambda: bool(signals.received), only=running)
        self._heartbeats.reset([])
        deadline_secs = time.monotonic() + delay_secs
        while time.monotonic() < deadline_secs and not signals.received:
            time.sleep(LOOP_SECS)
        self._membership = Membership(self._limits, self._hosts, num_started=membership.num_started)
        self._restart_environ = {
            "CTL_ATTEMPT": str(int(self._restart_environ.get("CTL_ATTEMPT", "1")) + 1),
            "CTL_RESTART_REASON": f"process {cause.task.task_index} {describe_end(cause)}",
        }
        self._first_cause = self._newest_host_loss = None
        self._leave_deadlines.clear()
        return True

    def _poll(self) -> None:
        self._update_hosts()
        for number, message in self._channels.events():
            self._receive(number, message)
        for process_exit in self._group.poll():
            self._handle_exit(process_exit)
        hang = self._heartbeats.find_hang(self._group)
        if hang:
            self._report(f"process {hang.task.task_index} {hang.description}; killing it")
            self._kill(hang.task.task_index)
        self._kill_silent_members()
        group = self._membership.form_group()
        if group:
            self._assign_ranks(group)
        for worker in self._membership.find_overdue_members():
            self._report(f"process {worker.number} did not join the new group in time; killing it")
            self._kill(worker.number)
        self._dismiss_surplus_workers()
        self._send_change()
        for slot in self._membership.find_free_slots():
            self._start_worker(slot)

    def _kill_silent_members(self) -> None:
        """Kills members that the others have lost, and that have not sent a message within their limit."""
        for worker in find_absent_members(self._membership):
            if worker.number not in self._silent_workers and self._channels.is_silent(worker.number):
                self._silent_workers.add(worker.number)
                self._report(
                    f"process {worker.number} on {worker.slot.host} is silent, and other processes have "
                    "lost it; killing it"
                )
                self._kill(worker.number)

    def _kill(self, number: int) -> None:
        self._group.send(_task(number), signal.SIGKILL)

    def _update_hosts(self) -> None:
        discovery = self._source.poll()
        if discovery is None:
            return
        if discovery.problem:
            if discovery.is_broken and not self._hosts.hosts:
                raise UsageError(f"{self._source.option}: {discovery.problem}")
            if discovery.problem != self._reported_problem:
                self._report(f"{discovery.problem}; keeping the previous list of hosts")
        elif self._hosts.update(discovery.hosts):
            self._report(f"hosts: {format_hosts(self._hosts.hosts)}")
            if self._membership.find_free_slots():  # members continue until processes wait in the new slots
                self._send_to_members({"notice": ADDED, "time": time.time()})
        self._reported_problem = discovery.problem

    def _receive(self, number: int, message: Mapping[str, Any]) -> None:
        if "join" in message:
            port = message["join"]
            if isinstance(port, int):
                skips_sync, group = message.get("skips_sync") is True, message.get("group")
                self._membership.set_waiting(number, port, skips_sync=skips_sync, group=group)
                if number in self._membership.workers:
                    self._hosts.record_connection(self._membership.workers[number].slot.host)
        elif "synced" in message:
            self._membership.record_sync(number)
        elif "unmet" in message:
            self._dissolve_group(number, message["unmet"], str(message.get("why")))
        elif "gone" in message:
            self._membership.set_waiting(number, None)

    def _dissolve_group(self, number: int, group: int, error_message: str) -> None:
        """Dissolves a group in which a process cannot connect to its peers. They form the next group."""
        worker = self._membership.record_connect_failure(number, group)
        if worker is None:
            return
        self._report(
            f"process {number} could not connect to its peers in group {group}; forming the group again"
        )
        self._send_to_members({"lost": worker.rank, "why": error_message}, excluded=worker)

    def _start_worker(self, slot: Slot) -> None:
        host = Host(slot.host)
        remote = None if host.is_local else slot.host
        try:
            launcher_address = self._resolve([Host("localhost"), host])[0] if remote else LOOPBACK
        except UsageError as e:
            self._report(f"{e}; {self._hosts.record_outage(slot.host)}")
            return
        ranks_of_process = _plan_ranks(self._membership.select_target_slots(), slot)
        environ = self._job.build_environ(ranks_of_process, host.address, is_here=remote is None)
        number = self._membership.add_worker(slot)
        environ |= self._restart_environ
        environ |= {
            "HOROVOD_ELASTIC": "1",
            "CTL_HVD_RENDEZVOUS": f"{launcher_address}:{self._channels.port}",
            "CTL_HVD_WORKER": str(number),
            "CTL_ELASTIC_NEWCOMER": str(int(self._membership.number > 0)),
            "CTL_ELASTIC_SLOT": str(self._membership.workers[number].replica),
        }
        if self._job.is_verbose or self._membership.number:
            self._report(f"starting process {number} on {host.address}, local rank {slot.index}")
        self._job.start(self._group, self._heartbeats, _task(number), environ, remote)

    def _handle_exit(self, process_exit: ProcessExit) -> None:
        number, membership = process_exit.task.task_index, self._membership
        self._heartbeats.release(process_exit.task)
        worker = membership.remove_worker(number, is_success=process_exit.returncode == 0)
        self._leave_deadlines.pop(number, None)
        if process_exit.returncode == 0 and not worker.is_dismissed:
            self.completed_workers.append((worker.rank, number))
        if worker.is_dismissed and worker.group == membership.number:
            self._send_to_members({"lost": worker.rank})  # it did not exit before the next group
        if process_exit.returncode == 0 or worker.is_dismissed:
            return
        host = worker.slot.host
        is_permanent, next_use = self._policy.is_permanent(process_exit), "its host is no longer listed"
        if is_permanent:
            next_use = "a new process would fail, too"
        elif self._hosts.is_listed(host):
            next_use = self._note_failure(host, process_exit)
        self._report(f"process {number} on {host} {describe_end(process_exit)}; {next_use}")
        if is_permanent:
            membership.failure = membership.failure or f"process {number} {describe_end(process_exit)}"
            self._first_cause, self._is_permanent_failure = process_exit, True
        if process_exit.loss == OUTSIDE:
            self._newest_host_loss = process_exit
        else:
            self._first_cause = self._first_cause or process_exit
        if membership.is_finishing and worker.group:
            self._failure_after_success = self._failure_after_success or process_exit
        if worker.group == membership.number:
            self._send_to_members({"lost": worker.rank})  # they may be waiting for it

    def _note_failure(self, host: str, process_exit: ProcessExit) -> str:
        """Records a failure. Returns a clause with the next use of the host."""
        if process_exit.loss == OUTSIDE:
            return self._hosts.record_outage(host)
        return (
            self._hosts.exclude(host) if process_exit.loss == REFUSED else self._hosts.record_failure(host)
        )

    def _assign_ranks(self, group: Group) -> None:
        """Sends each worker of a group its rank and the addresses of its peers."""
        self._change_sent_secs = -math.inf
        hosts = list(dict.fromkeys(worker.slot.host for worker in group.workers))
        try:
            addresses = self._resolve([Host(host) for host in hosts])
        except UsageError as e:
            self._membership.failure = str(e)
            return
        assignments = build_assignments(group, dict(zip(hosts, addresses, strict=True)))
        for worker, assignment in zip(group.workers, assignments, strict=True):
            message = {"place": assignment, "must_sync": group.must_sync}
            if not self._channels.send(worker.number, message):
                self._membership.set_waiting(worker.number, None)
        numbers = ", ".join(str(w.number) for w in group.workers)
        self._report(
            f"group {group.number}: {len(group.workers)} ranks, processes in the order of ranks: {numbers}"
        )

    def _dismiss_surplus_workers(self) -> None:
        """Requests the exit of workers without a slot, and kills those that do not exit in time."""
        now_secs = time.monotonic()
        surplus = self._membership.find_surplus_workers()
        for worker in find_leaving_workers(self._membership):
            self._membership.dismiss(worker.number)
            self._leave_deadlines[worker.number] = now_secs + FAILURE_GRACE_SECS
            self._report(
                f"process {worker.number} on {worker.slot.host} no longer has a slot; requesting its exit"
            )
            if not self._channels.send(worker.number, {"leave": True}):
                self._group.send(_task(worker.number), signal.SIGTERM)
        for number, deadline_secs in list(self._leave_deadlines.items()):
            worker = self._membership.workers[number]
            if not worker.is_dismissed and worker not in surplus:  # its host is listed again
                del self._leave_deadlines[number]
            elif now_secs >= deadline_secs:
                self._membership.dismiss(number)
                self._kill(number)

    def _send_change(self) -> None:
        """Notifies the members of new or surplus workers, once a second until the next group forms."""
        now_secs = time.monotonic()
        change = self._membership.find_change() if now_secs >= self._change_sent_secs + _REPEAT_SECS else 0
        if change:
            self._change_sent_secs = now_secs
            self._send_to_members({"change": change, "time": time.time()})
            for worker in self._membership.find_surplus_workers():
                if worker in self._membership.members:
                    self._leave_deadlines.setdefault(worker.number, now_secs + _LEAVE_SECS)

    def _send_to_members(self, message: Mapping[str, Any], excluded: Worker | None = None) -> None:
        for member in self._membership.members:
            if member is not excluded:
                group_message = {**message, "group": self._membership.number}
                self._channels.send(member.number, group_message)

    def _exit_code(self, signals: ForwardedSignals) -> int:
        failure_after_success = self._failure_after_success
        cause = failure_after_success or self._first_cause or self._newest_host_loss
        if signals.received:
            self._report("stopped by " + signal.Signals(signals.received[0]).name)
            return 128 + signals.received[0]
        if self._membership.failure:
            self._report(f"ending the job: {self._membership.failure}")
            if cause:
                number = cause.task.task_index
                self._report(f"process {number} {describe_end(cause)} (the first failure)")
            return cause.exit_code if cause else EXIT_FAILED
        if failure_after_success:
            self._report(
                f"process {failure_after_success.task.task_index} {describe_end(failure_after_success)}"
            )
            return failure_after_success.exit_code
        return EXIT_DONE


def _has_lost_state(membership: Membership) -> bool:
    """Returns True if all processes with the state of the job have ended."""
    return membership.had_state and not any(w.has_state for w in membership.workers.values())


def _task(worker_number: int) -> Topology:
    return Topology({}, "worker", worker_number)


def _plan_ranks(slots: Sequence[Slot], own_slot: Slot) -> Ranks:
    """Returns the expected ranks of a process if all other processes start as planned."""
    slots = [*slots, *([] if own_slot in slots else [own_slot])]
    planned = ranks.build_ranks([f"{slot.host}:{slot.index}" for slot in slots], slots.index(own_slot))
    return replace(planned, local_rank=own_slot.index)
