"""Supervision of one job: starts its processes, monitors them, and restarts them if that may help.

    exit_code = run_job(["python", "train.py"], allocation=LocalAllocation(RoleCounts(workers=2)),
                        log_dir=Path("logs"), settings=JobSettings(grace_secs=30.0))

The allocation chooses the hosts, `ProcessGroup` starts and ends processes, `Monitor` decides when they
end, and `RestartPolicy` decides on restarts. Call it from the main thread: signals are delivered there.
"""

import contextlib
import itertools
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ctl.distribute.topology import Topology
from ctl.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RETRY
from ctl.io.console import print_message
from ctl.launch.attempt_log import AttemptRecord
from ctl.launch.heartbeat_monitor import HeartbeatMonitor, Timeouts, heartbeat_dir
from ctl.launch.host_allocation import Allocation, Places
from ctl.launch.log_files import delete_earlier_logs, earlier_log_name, set_aside_logs
from ctl.launch.monitor import Monitor, Outcome, PassedOnSignals, is_port_clash, job_failures, late_failures
from ctl.launch.output import LogOutput
from ctl.launch.process import ProcessExit
from ctl.launch.process_group import ProcessGroup
from ctl.launch.progress import newest_step
from ctl.launch.restart_policy import RestartDecision, RestartPolicy
from ctl.launch.roles import log_name, serves, task_name, trains
from ctl.launch.terminal_text import tail
from ctl.supervision import lease

_SERVER_GRACE_SECS = 5.0  # from SIGTERM to SIGKILL for processes without state to save
_LOST_PEER_GRACE_SECS = 8.0  # the same for processes that lost a peer, unless they are saving
_SAVE_GRACE_SECS = 25.0  # the same for processes that are saving
_DISCOVERY_SECS = 2.0  # between two host discoveries, while there are too few hosts
_REST_INTERVAL_SECS = 0.05


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings for timeouts and restarts.

    Attributes:
      grace_secs: Time from SIGTERM to SIGKILL (seconds).
      policy: Restart policy.
      timeouts: Timeouts of heartbeats.
      model_dir: Directory of the checkpoints from which progress is read, if known.
      max_log_bytes: Limit of one log file (bytes), 0 for no limit.
    """

    grace_secs: float = 30.0
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    timeouts: Timeouts = field(default_factory=Timeouts)
    model_dir: Path | None = None
    max_log_bytes: int = 256 * 2**20


def run_job(command: Sequence[str], *, allocation: Allocation, log_dir: Path, settings: JobSettings) -> int:
    """Runs `command` once per process until the job has ended. Returns its exit code.

    The exit code is 0 if the chief ended with 0 and no other process failed before it; otherwise the
    code of the first failure (128+n for signal n) of the last attempt, or 130 and 143 after a SIGINT or
    SIGTERM to the launcher. If a process lost its port to another program, all are started once more on
    other ports. Raises UsageError if no process could be started.
    """
    with PassedOnSignals() as signals:
        return _Supervisor(command, allocation, log_dir, settings, signals).run()


class _Supervisor:
    """One job, from its first attempt to its last."""

    def __init__(
        self,
        command: Sequence[str],
        allocation: Allocation,
        log_dir: Path,
        settings: JobSettings,
        signals: PassedOnSignals,
    ):
        self._command = command
        self._allocation = allocation
        self._log_dir = log_dir
        self._settings = settings
        self._signals = signals
        self._heartbeats = HeartbeatMonitor(heartbeat_dir(log_dir), settings.timeouts)
        self._policy = settings.policy
        self._private = {"CTL_HVD_SECRET": secrets.token_hex(32)}  # authenticates its connections
        self._reason = ""  # of the newest restart
        self._num_processes = 0  # of the previous attempt

    def run(self) -> int:
        """Runs attempts until one succeeds, a restart cannot help, or a signal is received."""
        delete_earlier_logs(self._log_dir)
        with contextlib.closing(self._heartbeats):
            for number in itertools.count(1):
                places = self._places()
                if isinstance(places, int):
                    return places
                self._report_size(places)
                record = self._record(number, places)
                group, places, outcome = self._attempt(number, places)
                decision = self._decide(outcome, record)
                record.append_to(self._log_dir)
                if decision.delay_secs is None:
                    return self._conclude(group, places.tasks[0], outcome)
                self._report_restart(outcome, number, decision)
                if not self._rest(decision.delay_secs):
                    print_message("a signal came while waiting; not started again")
                    return 128 + self._signals.received[0]
                set_aside_logs(self._log_dir, places.tasks, number)
        raise AssertionError("attempts do not run out")

    def _places(self, shift: int = 0) -> Places | int:
        """Returns the places of the next attempt, or an exit code if there are none."""
        limit_secs, reported = self._settings.timeouts.startup, ""
        until_secs = time.monotonic() + (limit_secs or float("inf"))
        while True:
            found = self._allocation.places(shift=shift, interrupted=lambda: bool(self._signals.received))
            if self._signals.received:
                return 128 + self._signals.received[0]
            if isinstance(found, Places):
                return found
            if time.monotonic() >= until_secs:
                print_message(f"still not enough workers after {limit_secs:g} s: {found}")
                return EXIT_RETRY
            if found != reported:
                print_message(f"waiting for workers: {found}")
                reported = found
            self._rest(min(_DISCOVERY_SECS, max(0.0, until_secs - time.monotonic())))

    def _attempt(self, number: int, places: Places) -> tuple[ProcessGroup, Places, Outcome]:
        group, outcome = self._run(number, places)
        lost = self._port_clash(group, outcome) if not self._signals.received else None
        if lost:
            print_message(
                f"{task_name(lost)} could not bind its port ({lost.address}); "
                "starting all workers once more, on other ports"
            )
            others = self._places(shift=1)
            if isinstance(others, Places):
                places = others
                group, outcome = self._run(number, places)
        return group, places, outcome

    def _start(self, group: ProcessGroup, output: LogOutput, number: int, places: Places) -> None:
        environ = {
            "CTL_ATTEMPT": str(number),
            "CTL_STARTUP_TIMEOUT_SECS": f"{self._settings.timeouts.startup:g}",
        }
        environ |= {"CTL_RESTART_REASON": self._reason} if self._reason else {}
        environ |= {lease.DEAD_HOLDERS: dead} if (dead := lease.dead_holders()) else {}
        self._heartbeats.reset(places.tasks)
        try:
            for task in places.tasks:
                host = places.remote_host(task)
                beats = self._heartbeats.environ(task, is_remote=host is not None)
                group.start(task, {**environ, **beats}, private=self._private, host=host)
        finally:
            output.start()

    def _run(self, number: int, places: Places) -> tuple[ProcessGroup, Outcome]:
        grace_secs, signals, chief = self._settings.grace_secs, self._signals, places.tasks[0]
        output = LogOutput(self._log_dir, places.tasks, self._settings.max_log_bytes)
        group = ProcessGroup(self._command, output)
        monitor = Monitor(group, grace_secs, signals, self._heartbeats, chief=chief, log_dir=self._log_dir)
        try:
            self._start(group, output, number, places)
            outcome = monitor.wait()
            if outcome.stragglers and all(map(serves, outcome.stragglers)):
                server_secs = min(grace_secs, _SERVER_GRACE_SECS)
                group.end(server_secs, hurry=signals.impatient, only=outcome.stragglers)
                outcome = monitor.wait()
            if self._port_clash(group, outcome):
                grace_secs = 0.0  # no state to save yet, and TensorFlow would use all of it
            elif outcome.stragglers or (outcome.cause and _lost_peers(outcome.cause)):
                grace_secs = min(grace_secs, _LOST_PEER_GRACE_SECS)
            if group.running:
                print_message(_why_ending(group, chief, outcome, grace_secs, self._settings.grace_secs))
            self._end(group, outcome, grace_secs)
            for task in places.tasks:
                self._heartbeats.read(task)  # a short lifetime may fit between two checks
        except BaseException:
            group.end(0.0)
            raise
        return group, outcome

    def _end(self, group: ProcessGroup, outcome: Outcome, grace_secs: float) -> None:
        """Ends all processes. Servers end last, because the chief saves their variables."""
        signum = outcome.signum or signal.SIGTERM
        hurry = self._signals.impatient
        if outcome.cause and _lost_peers(outcome.cause) and grace_secs:
            until_secs = time.monotonic() + grace_secs
            grace_secs = min(self._settings.grace_secs, _SAVE_GRACE_SECS)

            def hurry() -> bool:
                if self._signals.impatient() or time.monotonic() < until_secs:
                    return self._signals.impatient()
                return not self._heartbeats.is_saving(group.running)

        if any(map(serves, group.running)):
            first = [t for t in group.running if not serves(t)]
            group.end(grace_secs, signum, hurry, only=first)
            signum, grace_secs = signal.SIGTERM, min(grace_secs, _SERVER_GRACE_SECS)
        group.end(grace_secs, signum, hurry)

    def _record(self, number: int, places: Places) -> AttemptRecord:
        return AttemptRecord(
            attempt=number,
            started=time.time(),
            step_before=self._step(),
            hosts=places.hosts,
            workers=sum(t.task_type in ("chief", "worker") for t in places.tasks),
        )

    def _step(self) -> int | None:
        """Returns the newest step, or None if neither checkpoints nor heartbeats have one."""
        step, highest = newest_step(self._settings.model_dir), self._heartbeats.highest_step
        if step is None and highest is not None:
            return 0 if self._settings.model_dir else highest
        return step

    def _decide(self, outcome: Outcome, record: AttemptRecord) -> RestartDecision:
        """Returns the decision after an attempt, and adds it to the record."""
        record.ended, record.step_after = time.time(), self._step()
        cause, decision = outcome.cause, RestartDecision()
        if cause and not self._signals.received:
            decision = self._policy.after(
                cause.exit_code,
                record.step_after,
                loss=cause.loss,
                trained=self._heartbeats.has_trained(cause.task),
            )
            self._reason = cause.reason
        if cause:
            record.reason, record.detected_secs = cause.reason, cause.silent_secs
            record.failed = {
                "task": f"{cause.task.task_type} {cause.task.task_index}",
                "job": cause.task.worker_index if trains(cause.task) else None,
                "exit_code": cause.exit_code,
                "signal": cause.signal_name,
            }
        elif outcome.stragglers:
            names = ", ".join(map(task_name, outcome.stragglers))
            record.reason = f"did not end by themselves: {names}"
        if self._signals.received:
            signame = signal.Signals(self._signals.received[0]).name
            record.reason = record.reason if cause else f"{signame} to the launcher"
            record.next = f"no restart: {signame} came"
        elif decision.delay_secs is not None:
            record.next = f"restart in {decision.delay_secs:g} s"
        elif cause:
            record.next = f"no restart: {decision.why_not}"
        if decision.is_news:
            print_message(f"{decision.why_not}; not started again")
        return decision

    def _report_size(self, places: Places) -> None:
        count, before = len(places.tasks), self._num_processes
        self._num_processes = count
        if not before:
            print_message(f"starting {count} process{'es' if count > 1 else ''}, logs in {self._log_dir}")
        elif before != count:
            print_message(" → ".join(f"{n} worker{'s' if n > 1 else ''}" for n in (before, count)))

    def _report_restart(self, outcome: Outcome, number: int, decision: RestartDecision) -> None:
        if outcome.cause is None:
            return
        kept = self._log_dir / earlier_log_name(outcome.cause.task, number)
        hint = f" ({outcome.cause.hint})" if outcome.cause.hint else ""
        print_message(f"{outcome.cause.reason}; its log will be {kept}{hint}")
        count = f"{self._policy.restarts} of {self._policy.max_restarts}"
        restart = f"restart {count}" if decision.is_counted else f"restart (not counted; {count} used)"
        print_message(f"{restart} in {decision.delay_secs:g} s: {outcome.cause.reason}")

    def _conclude(self, group: ProcessGroup, chief: Topology, outcome: Outcome) -> int:
        """Reports the end of a failed job, and returns its exit code."""
        if outcome.cause:
            task = outcome.cause.task
            log = self._log_dir / log_name(task)
            hint = f" ({outcome.cause.hint})" if outcome.cause.hint else ""
            print_message(f"{task_name(task)} failed first: {outcome.cause}; its log is {log}{hint}")
            if task != chief:  # the output of the chief was on the console
                with contextlib.suppress(OSError):
                    print(tail(log), file=sys.stderr, flush=True)
            return outcome.cause.exit_code
        ends = late_failures(group, chief)
        if outcome.signum and (job_failures(group, chief) or ends or group.running):
            print_message("ended: " + ", ".join(f"{task_name(e.task)} {e}" for e in group.exits))
            return 128 + outcome.signum
        if outcome.stragglers:
            names = ", ".join(map(task_name, outcome.stragglers))
            print_message(
                f"warning: the chief was done, {names} did not end by themselves; the job is complete"
            )
        elif ends:
            names = ", ".join(f"{task_name(e.task)} ended with {e}" for e in ends)
            print_message(f"warning: {names} after the chief was done; the job is complete")
        return EXIT_DONE

    def _port_clash(self, group: ProcessGroup, outcome: Outcome) -> Topology | None:
        """Returns the first process with an occupied port, if that is the cause of the failure."""
        failures = group.failures if outcome.cause else []
        return next((e.task for e in failures if is_port_clash(self._log_dir, e)), None)

    def _rest(self, secs: float) -> bool:
        """Waits. Returns False immediately if a signal is received."""
        until_secs = time.monotonic() + secs
        while not self._signals.received and time.monotonic() < until_secs:
            time.sleep(_REST_INTERVAL_SECS)
        return not self._signals.received


def _lost_peers(cause: ProcessExit) -> bool:
    """Returns True if the remaining processes have lost a peer, and so cannot save."""
    return cause.exit_code >= 128 and cause.exit_code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED)


def _why_ending(
    group: ProcessGroup, chief: Topology, outcome: Outcome, grace_secs: float, waited_secs: float
) -> str:
    if outcome.signum:
        signame = signal.Signals(outcome.signum).name
        first = [t for t in group.running if not serves(t)]
        servers = len(group.running) - len(first)
        after = f"; {servers} that serve are ended after them" if servers else ""
        count = f"{len(first)} process" + ("es" if len(first) != 1 else "")
        return (
            f"received {signame} and sent it to {count}; SIGKILL follows after {grace_secs:g} s or "
            f"a second signal{after}"
        )
    if outcome.cause:
        why = f"{task_name(outcome.cause.task)} failed"
    else:
        why = f"{task_name(chief)} is done but others still run after {waited_secs:g} s"
    names = ", ".join(map(task_name, group.running))
    return f"{why}; ending {names} with SIGTERM, and SIGKILL after {grace_secs:g} s"
