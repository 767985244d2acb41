"""Supervision of one job: starts its processes, monitors them, and restarts them after a failure.

    exit_code = run_job(["python", "train.py"], allocation=LocalAllocation(RoleCounts(workers=2)),
                        log_dir=Path("logs"), settings=JobSettings(grace_secs=30.0))

The allocation chooses the hosts, `ProcessGroup` starts and ends processes, `Monitor` decides when they
end, and `RestartPolicy` decides on restarts. Call `run_job` from the main thread, which receives signals.
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
from ctl.launch.host_allocation import Allocation, Placement
from ctl.launch.log_files import archive_logs, delete_earlier_logs, earlier_log_name
from ctl.launch.monitor import (
    ForwardedSignals,
    Monitor,
    Outcome,
    is_port_clash,
    job_failures,
    late_failures,
)
from ctl.launch.output import LogOutput
from ctl.launch.process import ProcessExit
from ctl.launch.process_group import ProcessGroup
from ctl.launch.progress import newest_step
from ctl.launch.restart_policy import RestartDecision, RestartPolicy
from ctl.launch.roles import is_server, is_training_task, log_name, task_name
from ctl.launch.terminal_text import read_tail
from ctl.supervision import lease

_SERVER_GRACE_SECS = 5.0  # from SIGTERM to SIGKILL for processes without state to save
_LOST_PEER_GRACE_SECS = 8.0  # the same for processes that lost a peer, unless they are saving
_SAVE_GRACE_SECS = 25.0  # the same for processes that are saving
_DISCOVERY_SECS = 2.0  # between two host discoveries, while there are too few hosts
_WAIT_INTERVAL_SECS = 0.05


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

    The exit code is 0 if the chief succeeded and no worker failed earlier, or later with a code up to 127;
    otherwise the code of the first failure (128+n for signal n) of the last attempt, 134 if hosts are
    missing, or 130 and 143 after a SIGINT or SIGTERM to the launcher. If a process lost its port to another
    program, all processes are restarted on other ports. Raises UsageError if no process could be started.
    """
    with ForwardedSignals() as signals:
        return _Supervisor(command, allocation, log_dir, settings, signals).run()


class _Supervisor:
    """One job, from its first attempt to its last."""

    def __init__(
        self,
        command: Sequence[str],
        allocation: Allocation,
        log_dir: Path,
        settings: JobSettings,
        signals: ForwardedSignals,
    ):
        self._command = command
        self._allocation = allocation
        self._log_dir = log_dir
        self._settings = settings
        self._signals = signals
        self._heartbeats = HeartbeatMonitor(heartbeat_dir(log_dir), settings.timeouts)
        self._policy = settings.policy
        self._private = {"CTL_HVD_SECRET": secrets.token_hex(32)}  # authenticates connections of the job
        self._reason = ""  # of the newest restart
        self._num_processes = 0  # of the previous attempt

    def run(self) -> int:
        """Runs attempts until one succeeds, a restart cannot help, or a signal is received."""
        delete_earlier_logs(self._log_dir)
        with contextlib.closing(self._heartbeats):
            for number in itertools.count(1):
                placement = self._allocate()
                if isinstance(placement, int):
                    return placement
                self._report_size(placement)
                record = self._new_record(number, placement)
                group, placement, outcome = self._run_attempt(number, placement)
                decision = self._decide(outcome, record)
                record.append_to(self._log_dir)
                if decision.delay_secs is None:
                    return self._conclude(group, placement.tasks[0], outcome)
                self._report_restart(outcome, number, decision)
                if not self._wait(decision.delay_secs):
                    print_message("received a signal while waiting; not restarting")
                    return 128 + self._signals.received[0]
                archive_logs(self._log_dir, placement.tasks, number)
        raise AssertionError("the sequence of attempts has no end")

    def _allocate(self, shift: int = 0) -> Placement | int:
        """Returns the placement of the next attempt, or an exit code: after a signal, or without hosts."""
        limit_secs, reported_message = self._settings.timeouts.startup, ""
        deadline_secs = time.monotonic() + (limit_secs or float("inf"))
        while True:
            placement = self._allocation.place_processes(
                shift=shift, interrupted=lambda: bool(self._signals.received)
            )
            if self._signals.received:
                return 128 + self._signals.received[0]
            if isinstance(placement, Placement):
                return placement
            if time.monotonic() >= deadline_secs:
                print_message(f"not enough workers after {limit_secs:g} s: {placement}")
                return EXIT_RETRY
            if placement != reported_message:
                print_message(f"waiting for workers: {placement}")
                reported_message = placement
            self._wait(min(_DISCOVERY_SECS, max(0.0, deadline_secs - time.monotonic())))

    def _run_attempt(self, number: int, placement: Placement) -> tuple[ProcessGroup, Placement, Outcome]:
        group, outcome = self._run_group(number, placement)
        clashing_task = self._find_port_clash(group, outcome) if not self._signals.received else None
        if clashing_task:
            print_message(
                f"{task_name(clashing_task)} could not bind its port ({clashing_task.address}); "
                "restarting all processes on other ports"
            )
            new_placement = self._allocate(shift=1)
            if isinstance(new_placement, Placement):
                placement = new_placement
                group, outcome = self._run_group(number, placement)
        return group, placement, outcome

    def _start(self, group: ProcessGroup, output: LogOutput, number: int, placement: Placement) -> None:
        environ = {
            "CTL_ATTEMPT": str(number),
            "CTL_STARTUP_TIMEOUT_SECS": f"{self._settings.timeouts.startup:g}",
        }
        environ |= {"CTL_RESTART_REASON": self._reason} if self._reason else {}
        environ |= {lease.DEAD_HOLDERS: dead} if (dead := lease.dead_holders()) else {}
        self._heartbeats.reset(placement.tasks)
        try:
            for task in placement.tasks:
                host = placement.remote_host(task)
                heartbeat_environ = self._heartbeats.environ(task, is_remote=host is not None)
                group.start(task, {**environ, **heartbeat_environ}, private=self._private, host=host)
        finally:
            output.start()

    def _run_group(self, number: int, placement: Placement) -> tuple[ProcessGroup, Outcome]:
        grace_secs, signals, chief = self._settings.grace_secs, self._signals, placement.tasks[0]
        output = LogOutput(self._log_dir, placement.tasks, self._settings.max_log_bytes)
        group = ProcessGroup(self._command, output)
        monitor = Monitor(group, grace_secs, signals, self._heartbeats, chief=chief, log_dir=self._log_dir)
        try:
            self._start(group, output, number, placement)
            outcome = monitor.wait()
            if outcome.stragglers and all(map(is_server, outcome.stragglers)):
                server_secs = min(grace_secs, _SERVER_GRACE_SECS)
                group.end(server_secs, is_urgent=signals.is_repeated, only=outcome.stragglers)
                outcome = monitor.wait()
            if self._find_port_clash(group, outcome):
                grace_secs = (
                    0.0  # no state to save yet, and TensorFlow would wait for the whole grace period
                )
            elif outcome.stragglers or (outcome.cause and _has_lost_peers(outcome.cause)):
                grace_secs = min(grace_secs, _LOST_PEER_GRACE_SECS)
            if group.running:
                print_message(
                    _describe_ending(group, chief, outcome, grace_secs, self._settings.grace_secs)
                )
            self._end_group(group, outcome, grace_secs)
            for task in placement.tasks:
                self._heartbeats.read(task)  # a process may start and end between two polls
        except BaseException:
            group.end(0.0)
            raise
        return group, outcome

    def _end_group(self, group: ProcessGroup, outcome: Outcome, grace_secs: float) -> None:
        """Ends all processes. Servers end last, because the chief saves their variables."""
        signum = outcome.signum or signal.SIGTERM
        is_urgent = self._signals.is_repeated
        if outcome.cause and _has_lost_peers(outcome.cause) and grace_secs:
            deadline_secs = time.monotonic() + grace_secs
            grace_secs = min(self._settings.grace_secs, _SAVE_GRACE_SECS)

            def is_urgent() -> bool:
                if self._signals.is_repeated() or time.monotonic() < deadline_secs:
                    return self._signals.is_repeated()
                return not self._heartbeats.is_saving(group.running)

        if any(map(is_server, group.running)):
            first_tasks = [t for t in group.running if not is_server(t)]
            group.end(grace_secs, signum, is_urgent, only=first_tasks)
            signum, grace_secs = signal.SIGTERM, min(grace_secs, _SERVER_GRACE_SECS)
        group.end(grace_secs, signum, is_urgent)

    def _new_record(self, number: int, placement: Placement) -> AttemptRecord:
        return AttemptRecord(
            attempt=number,
            started=time.time(),
            step_before=self._newest_step(),
            hosts=placement.hosts,
            workers=sum(t.task_type in ("chief", "worker") for t in placement.tasks),
        )

    def _newest_step(self) -> int | None:
        """Returns the newest step, or None if neither checkpoints nor heartbeats have one."""
        checkpoint_step, heartbeat_step = (
            newest_step(self._settings.model_dir),
            self._heartbeats.highest_step,
        )
        if checkpoint_step is None and heartbeat_step is not None:
            return 0 if self._settings.model_dir else heartbeat_step
        return checkpoint_step

    def _decide(self, outcome: Outcome, record: AttemptRecord) -> RestartDecision:
        """Returns the decision after an attempt, and adds it to the record."""
        record.ended, record.step_after = time.time(), self._newest_step()
        cause, decision = outcome.cause, RestartDecision()
        if cause and not self._signals.received:
            decision = self._policy.decide(
                cause.exit_code,
                record.step_after,
                loss=cause.loss,
                has_trained=self._heartbeats.has_trained(cause.task),
            )
            self._reason = cause.reason
        if cause:
            record.reason, record.detected_secs = cause.reason, cause.silent_secs
            record.failed = {
                "task": f"{cause.task.task_type} {cause.task.task_index}",
                "job": cause.task.worker_index if is_training_task(cause.task) else None,
                "exit_code": cause.exit_code,
                "signal": cause.signal_name,
            }
        elif outcome.stragglers:
            names = ", ".join(map(task_name, outcome.stragglers))
            record.reason = f"did not exit after the chief had finished: {names}"
        if self._signals.received:
            signal_name = signal.Signals(self._signals.received[0]).name
            record.reason = record.reason if cause else f"{signal_name} to the launcher"
            record.next = f"no restart: received {signal_name}"
        elif decision.delay_secs is not None:
            record.next = f"restart in {decision.delay_secs:g} s"
        elif cause:
            record.next = f"no restart: {decision.refusal}"
        if decision.should_report:
            print_message(f"{decision.refusal}; not restarting")
        return decision

    def _report_size(self, placement: Placement) -> None:
        num_processes, previous_count = len(placement.tasks), self._num_processes
        self._num_processes = num_processes
        if not previous_count:
            plural = "es" if num_processes > 1 else ""
            print_message(f"starting {num_processes} process{plural}, logs in {self._log_dir}")
        elif previous_count != num_processes:
            print_message(
                " → ".join(f"{n} worker{'s' if n > 1 else ''}" for n in (previous_count, num_processes))
            )

    def _report_restart(self, outcome: Outcome, number: int, decision: RestartDecision) -> None:
        if outcome.cause is None:
            return
        log_path = self._log_dir / earlier_log_name(outcome.cause.task, number)
        hint = f" ({outcome.cause.hint})" if outcome.cause.hint else ""
        print_message(f"{outcome.cause.reason}; keeping its log as {log_path}{hint}")
        used_restarts = f"{self._policy.restarts} of {self._policy.max_restarts}"
        label = (
            f"restart {used_restarts}"
            if decision.is_counted
            else f"restart (not counted; {used_restarts} used)"
        )
        print_message(f"{label} in {decision.delay_secs:g} s: {outcome.cause.reason}")

    def _conclude(self, group: ProcessGroup, chief: Topology, outcome: Outcome) -> int:
        """Reports the end of a failed job, and returns its exit code."""
        if outcome.cause:
            task = outcome.cause.task
            log = self._log_dir / log_name(task)
            hint = f" ({outcome.cause.hint})" if outcome.cause.hint else ""
            print_message(f"{task_name(task)} failed first: {outcome.cause}; its log is {log}{hint}")
            if task != chief:  # the output of the chief was on the console
                with contextlib.suppress(OSError):
                    print(read_tail(log), file=sys.stderr, flush=True)
            return outcome.cause.exit_code
        late_exits = late_failures(group, chief)
        if outcome.signum and (job_failures(group, chief) or late_exits or group.running):
            print_message("ended: " + ", ".join(f"{task_name(e.task)} {e}" for e in group.exits))
            return 128 + outcome.signum
        if outcome.stragglers:
            names = ", ".join(map(task_name, outcome.stragglers))
            print_message(
                f"warning: {names} did not exit after the chief had finished; the job is complete"
            )
        elif late_exits:
            names = ", ".join(f"{task_name(e.task)} ended with {e}" for e in late_exits)
            print_message(f"warning: {names} after the chief had finished; the job is complete")
        return EXIT_DONE

    def _find_port_clash(self, group: ProcessGroup, outcome: Outcome) -> Topology | None:
        """Returns the first process with an occupied port, if that is the cause of the failure."""
        failures = group.failures if outcome.cause else []
        return next((e.task for e in failures if is_port_clash(self._log_dir, e)), None)

    def _wait(self, secs: float) -> bool:
        """Waits for `secs` seconds. Returns False immediately if a signal is received."""
        deadline_secs = time.monotonic() + secs
        while not self._signals.received and time.monotonic() < deadline_secs:
            time.sleep(_WAIT_INTERVAL_SECS)
        return not self._signals.received


def _has_lost_peers(cause: ProcessExit) -> bool:
    """Returns True if the remaining processes have lost a peer, and so cannot save."""
    return cause.exit_code >= 128 and cause.exit_code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED)


def _describe_ending(
    group: ProcessGroup, chief: Topology, outcome: Outcome, grace_secs: float, waited_secs: float
) -> str:
    if outcome.signum:
        signal_name = signal.Signals(outcome.signum).name
        first_tasks = [t for t in group.running if not is_server(t)]
        num_servers = len(group.running) - len(first_tasks)
        server_clause = (
            f"; stopping {num_servers} server{'s' if num_servers > 1 else ''} after them"
            if num_servers
            else ""
        )
        process_count = f"{len(first_tasks)} process" + ("es" if len(first_tasks) != 1 else "")
        return (
            f"forwarded {signal_name} to {process_count}; sending SIGKILL after {grace_secs:g} s or "
            f"a second signal{server_clause}"
        )
    if outcome.cause:
        reason = f"{task_name(outcome.cause.task)} failed"
    else:
        reason = (
            f"{task_name(chief)} has finished, but other processes are still running after {waited_secs:g} "
            "s"
        )
    names = ", ".join(map(task_name, group.running))
    return f"{reason}; sending SIGTERM to {names}, and SIGKILL after {grace_secs:g} s"
