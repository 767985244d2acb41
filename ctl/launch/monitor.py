"""Monitoring of a process group: decides when it ends, and for which reason.

    with ForwardedSignals() as signals:
        outcome = Monitor(group, grace_secs=30.0, signals=signals, heartbeats=heartbeats).wait()

It restarts a dead worker of a job with parameter servers and kills hung processes. It starts and ends no
other processes. Call it from the main thread, because signals are delivered there.
"""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctl.distribute.topology import Topology
from ctl.errors import EXIT_RETRY
from ctl.io.console import print_message
from ctl.launch.heartbeat_monitor import HeartbeatMonitor
from ctl.launch.process import ProcessExit
from ctl.launch.process_group import ProcessGroup
from ctl.launch.restart_policy import RESTART_PAUSE_SECS
from ctl.launch.roles import is_expendable, is_server, is_training_task, log_name, task_name
from ctl.supervision.signals import is_ignored

_POLL_SECS = 0.05
_CAUSE_SECS = 3.0  # after a process has lost a peer: time to detect the end of that peer
_ENDING_CAUSE_SECS = 30.0  # the same while a process that saves or has left its training still runs
_PORT_CLASH = b"Could not start gRPC server"
_PORT_CLASH_SECS = 30.0  # workers import TensorFlow before they bind


class ForwardedSignals:
    """A context that records SIGINT and SIGTERM. The caller forwards them to its processes.

    A SIGHUP (a terminal or ssh session that closes) counts as SIGTERM. It often arrives twice, so it never
    counts as the second signal. If it is ignored, as under `nohup`, it remains ignored.

    An ignored SIGCHLD, which some parents set, would lose exit codes, so it is reset to the default.

    Attributes:
      received: Numbers of the received signals, in order.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "ForwardedSignals":
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if not is_ignored(signum):
                self._handlers[signum] = signal.signal(signum, self._receive)
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: object) -> None:
        if signum != signal.SIGHUP:
            self.received.append(signum)
        elif not self.received:
            self.received.append(signal.SIGTERM)

    def is_repeated(self) -> bool:
        """Returns True after the second signal, which ends the grace period."""
        return len(self.received) > 1


@dataclass(frozen=True)
class Outcome:
    """Result of the monitoring: a failure, a signal, processes that outlived the chief, or none."""

    cause: ProcessExit | None = None
    signum: int | None = None
    stragglers: tuple[Topology, ...] = ()


def job_failures(group: ProcessGroup, chief: Topology) -> list[ProcessExit]:
    """Returns the exits that make the job a failure, in the order of detection.

    The exits of an evaluator and of a worker that only serves do not count. Once the chief has succeeded,
    the job is complete. Then only an error of a worker's own program (exit codes up to 127) counts.
    """
    is_job_complete = any(e.task == chief and e.returncode == 0 for e in group.exits)
    return [
        e
        for e in group.failures
        if not is_expendable(e.task) and not (is_job_complete and _is_after_success(e))
    ]


def late_failures(group: ProcessGroup, chief: Topology) -> list[ProcessExit]:
    """Returns the exits to warn of: processes that were lost after the chief had succeeded."""
    counted = job_failures(group, chief)
    return [e for e in group.failures if is_training_task(e.task) and e not in counted]


def _is_after_success(process_exit: ProcessExit) -> bool:
    return is_server(process_exit.task) or process_exit.exit_code >= 128


def is_port_clash(log_dir: Path, process_exit: ProcessExit) -> bool:
    """Returns True for a process that failed early and logged that its port was taken."""
    with contextlib.suppress(OSError):
        ended_early = process_exit.returncode != 0 and process_exit.lived_secs <= _PORT_CLASH_SECS
        return ended_early and _PORT_CLASH in (log_dir / log_name(process_exit.task)).read_bytes()
    return False


def may_have_lost_peer(process_exit: ProcessExit) -> bool:
    """Returns True if a process may have lost a peer: EXIT_RETRY is the exit code of SIGABRT, too."""
    return process_exit.exit_code == EXIT_RETRY


@dataclass
class Monitor:
    """Monitor of one group from its start to its end. `wait` may be called again to continue.

    Attributes:
      group: The process group.
      grace_secs: Time for processes to end after the chief (seconds).
      signals: Received signals.
      heartbeats: Detector of hung processes, if any.
      chief: Process that completes the job. None for the equal ranks of `ctlrun`.
      log_dir: Directory of the logs.
      is_consequence: Returns True for the end of a process that may only have lost a peer.
    """

    group: ProcessGroup
    grace_secs: float
    signals: ForwardedSignals
    heartbeats: HeartbeatMonitor | None = None
    chief: Topology | None = None
    log_dir: Path = Path()
    is_consequence: Callable[[ProcessExit], bool] = may_have_lost_peer
    _num_processed: int = 0  # processed exits of the group
    _num_starts: dict[int, int] = field(default_factory=dict)  # worker -> number of restarts
    # Worker -> time of its restart, and the end that caused it.
    _pending_restarts: dict[int, tuple[float, ProcessExit]] = field(default_factory=dict)
    _chief_done_secs: float | None = None  # time.monotonic
    _waits_for_evaluators: bool = False

    def wait(self) -> Outcome:
        """Waits until the group has ended or has to be ended.

        Processes may outlive a successful chief by the grace period, and evaluators without limit.
        """
        while True:
            self.group.poll()
            if self.signals.received:
                return Outcome(signum=self.signals.received[0])
            cause = self._find_cause() if self._failures() else self._handle_expendable()
            cause = cause or self._kill_hung_process()
            if cause is not None:
                return Outcome(cause=cause)
            if not self.group.running and not self._pending_restarts:
                return Outcome()
            if self.chief and not self._has_chief() and self._is_overdue():
                stragglers = tuple(t for t in self.group.running if t.task_type != "evaluator")
                if stragglers:
                    return Outcome(stragglers=stragglers)
                self._report_evaluators()
            time.sleep(_POLL_SECS)

    def _failures(self) -> list[ProcessExit]:
        return job_failures(self.group, self.chief) if self.chief else self.group.failures

    def _has_chief(self) -> bool:
        return self.chief in self.group.running

    def _is_overdue(self) -> bool:
        now_secs = time.monotonic()
        self._chief_done_secs = self._chief_done_secs or now_secs
        self._pending_restarts.clear()
        return now_secs - self._chief_done_secs >= self.grace_secs

    def _report_evaluators(self) -> None:
        if not self._waits_for_evaluators and self.group.running:
            self._waits_for_evaluators = True
            names = ", ".join(map(task_name, self.group.running))
            print_message(
                f"training has finished; waiting for {names} to evaluate the remaining checkpoints (Ctrl-C "
                "stops it)"
            )

    def _find_cause(self) -> ProcessExit | None:
        """Returns the failure that caused the remaining failures, or None if the chief has succeeded.

        A worker that lost a peer often ends before that peer does, with EXIT_RETRY, or with SIGABRT
        from TensorFlow, which is the same number. Therefore the first other code has priority, if one is
        detected in time: a process with its own error may have notified its peers before it ends.
        A parameter server may lose a successful chief, and its end may be detected first.
        """
        start_secs = time.monotonic()
        while failed := self._failures():
            for failure in failed:
                is_served_by_chief = is_server(failure.task) and self._has_chief()
                if not self.is_consequence(failure) and not is_served_by_chief:
                    return failure
            stopped = self._kill_stopped_peer()
            if stopped is not None:
                return stopped
            waited_secs = time.monotonic() - start_secs
            has_timed_out = waited_secs >= _CAUSE_SECS and not self._is_ending(waited_secs)
            if not self.group.running or self.signals.received or has_timed_out:
                return failed[0]
            time.sleep(_POLL_SECS)
            self.group.poll()
        return None

    def _is_ending(self, waited_secs: float) -> bool:
        if self.heartbeats is None or waited_secs >= _ENDING_CAUSE_SECS:
            return False
        return self.heartbeats.is_ending(t for t in self.group.running if is_training_task(t))

    def _kill_stopped_peer(self) -> ProcessExit | None:
        """Returns the end of a process that the kernel has stopped and its peers have lost. Kills it."""
        task = next((t for t in self.group.stopped if not is_expendable(t)), None)
        if task is None or self.chief is None:
            return None
        print_message(f"{task_name(task)} is stopped (SIGSTOP), and its peers have lost it; killing it")
        self.group.kill(task)
        return ProcessExit(task, EXIT_RETRY, 0.0, "was stopped (SIGSTOP) and lost by its peers")

    def _kill_hung_process(self) -> ProcessExit | None:
        """Returns the end of a hung process, which ends the attempt. If it is expendable, only kills it."""
        hang = self.heartbeats.find_hang(self.group) if self.heartbeats else None
        if hang is None:
            return None
        if self.chief:
            print_message(f"{task_name(hang.task)} {hang.description}; killing it")
        self.group.kill(hang.task)
        if is_expendable(hang.task):
            return None
        return ProcessExit(hang.task, EXIT_RETRY, 0.0, hang.description, hang.silent_secs)

    def _handle_expendable(self) -> ProcessExit | None:
        """Restarts or reports expendable processes. Returns an end after which the job cannot continue."""
        new_exits = self.group.exits[self._num_processed :]
        self._num_processed = len(self.group.exits)
        for process_exit in new_exits:
            if not is_expendable(process_exit.task) or process_exit.returncode == 0:
                continue
            if process_exit.task.task_type == "evaluator":
                print_message(
                    f"{task_name(process_exit.task)} failed: {process_exit}; training continues without "
                    "it; "
                    f"its log is {self.log_dir / log_name(process_exit.task)}"
                )
            elif self._has_chief():
                if is_port_clash(self.log_dir, process_exit) and not self._num_starts.get(
                    process_exit.task.task_index
                ):
                    return process_exit
                self._schedule_restart(process_exit)
        self._start_pending()
        return self._find_worker_loss(new_exits)

    def _schedule_restart(self, process_exit: ProcessExit) -> None:
        index = process_exit.task.task_index
        count = self._num_starts.get(index, 0)
        if count == len(RESTART_PAUSE_SECS):
            print_message(
                f"{task_name(process_exit.task)} ended with {process_exit} after {count} restarts; the job "
                "continues "
                f"without it; its log is {self.log_dir / log_name(process_exit.task)}"
            )
            return
        self._num_starts[index] = count + 1
        self._pending_restarts[index] = (time.monotonic() + RESTART_PAUSE_SECS[count], process_exit)
        print_message(
            f"{task_name(process_exit.task)} ended with {process_exit}; the job continues, restarting it "
            f"in {RESTART_PAUSE_SECS[count]:g} s ({count + 1} of {len(RESTART_PAUSE_SECS)})"
        )

    def _start_pending(self) -> None:
        for index, (restart_secs, process_exit) in list(self._pending_restarts.items()):
            if time.monotonic() >= restart_secs and self._has_chief():
                del self._pending_restarts[index]
                if self.heartbeats:
                    self.heartbeats.forget(process_exit.task)
                self.group.restart(process_exit)

    def _find_worker_loss(self, new_exits: list[ProcessExit]) -> ProcessExit | None:
        """Returns the newest failure if no worker of the chief is running and no restart is pending."""
        serving_workers = [t for t in self.group.running if is_server(t) and t.task_type == "worker"]
        if serving_workers or self._pending_restarts or not self._has_chief():
            return None
        failures = [
            e for e in new_exits if e.returncode != 0 and is_expendable(e.task) and is_server(e.task)
        ]
        return failures[-1] if failures else None
