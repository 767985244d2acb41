"""Starts the processes of one job, looks after them, and starts them again when that may help.

    exit_code = launch(["python", "train.py"], layout=Fixed(Roles(workers=2)),
                       log_dir=Path("logs"), settings=Settings(max_restarts=3))

A layout says where processes go, `Gang` starts and ends them, `Watch` decides when it is time to,
`Policy` whether to try again; this puts them together and says what happened. Call it from the main
thread: signals are delivered there.
"""

import contextlib
import itertools
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ctl.distribute.cluster import Cluster
from ctl.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RETRY
from ctl.io.console import say
from ctl.launch.attempts import Attempt
from ctl.launch.heartbeats import Pulse, Timeouts
from ctl.launch.layout import Discovered, Layout, Places
from ctl.launch.log_files import earlier_name, forget_earlier, set_aside
from ctl.launch.logs import tail
from ctl.launch.monitor import Outcome, PassedOnSignals, Watch, clashed, failures, late
from ctl.launch.process_group import Gang
from ctl.launch.processes import Exit
from ctl.launch.progress import newest_step
from ctl.launch.restart_policy import Policy, Verdict
from ctl.launch.roles import name, serves, trains
from ctl.supervision import lease

_SERVER_SECS = 5.0  # from SIGTERM to SIGKILL for what has no state to save
_LOST_SECS = 8.0  # the same for those that lost a peer, unless they are saving
_LONGEST_SAVE_SECS = 25.0  # and then
_ASK_SECS = 2.0  # between two questions for hosts, while there are too few
_POLL_SECS = 0.05


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long to wait and how often to try.

    Attributes:
      grace_secs: from SIGTERM to SIGKILL; backoff_secs: before the first restart, then doubled.
      model_dir: where checkpoints tell how far the job is, if known.
      most_log_bytes: of one log file; 0 is without bound.
    """

    grace_secs: float = 30.0
    max_restarts: int = 3
    backoff_secs: float = 1.0
    restart_on_error: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    model_dir: Path | None = None
    most_log_bytes: int = 256 * 2**20


def launch(command: Sequence[str], *, layout: Layout, log_dir: Path, settings: Settings) -> int:
    """Runs `command` once per process until the job has ended; returns its exit code.

    That is 0 if the chief ended with 0 and no other failed before it, the first failing one's code
    (128+n for signal n) of the last attempt, or 130 and 143 after a SIGINT or SIGTERM to us. Raises
    UsageError when nothing could be started. When a process lost its port to another program, all
    are started once more on other ports.
    """
    with PassedOnSignals() as signals:
        return _Supervisor(command, layout, log_dir, settings, signals).run()


class _Supervisor:
    """One job, from its first attempt to its last."""

    def __init__(
        self, command: Sequence[str], layout: Layout, log_dir: Path, settings: Settings,
        signals: PassedOnSignals,
    ):  # fmt: skip
        self._command = command
        self._layout = layout
        self._log_dir = log_dir
        self._settings = settings
        self._signals = signals
        self._pulse = Pulse(log_dir, settings.timeouts)
        self._policy = Policy(
            max_restarts=settings.max_restarts, backoff_secs=settings.backoff_secs,
            restart_on_error=settings.restart_on_error, saves=settings.model_dir is not None,
            hosts_change=isinstance(layout, Discovered),
        )  # fmt: skip
        self._private = {"CTL_HVD_SECRET": secrets.token_hex(32)}  # what its sockets ask for
        self._reason = ""  # of the newest restart
        self._workers = 0  # of the attempt before

    def run(self) -> int:
        """Attempt after attempt, until one is done, cannot be helped, or a signal comes."""
        forget_earlier(self._log_dir)
        for number in itertools.count(1):
            places = self._places()
            if isinstance(places, int):
                return places
            self._tell_size(places)
            record = self._record(number, places)
            gang, outcome = self._attempt(number, places)
            verdict = self._judge(outcome, record)
            record.add_to(self._log_dir)
            if verdict.delay_secs is None:
                return _conclude(gang, outcome)
            self._tell_restart(outcome, number, verdict.delay_secs)
            if not self._rest(verdict.delay_secs):
                say("a signal came while waiting; not started again")
                return 128 + self._signals.received[0]
            set_aside(self._log_dir, gang.tasks, number)
        raise AssertionError("attempts do not run out")

    def _places(self, shift: int = 0) -> Places | int:
        """Where the next attempt goes; an exit code if there is no place for it."""
        limit_secs, said = self._settings.timeouts.startup, ""
        until_secs = time.monotonic() + (limit_secs or float("inf"))
        while True:
            found = self._layout.places(
                shift=shift, interrupted=lambda: bool(self._signals.received)
            )
            if self._signals.received:
                return 128 + self._signals.received[0]
            if isinstance(found, Places):
                return found
            if time.monotonic() >= until_secs:
                say(f"still not enough workers after {limit_secs:g} s: {found}")
                return EXIT_RETRY
            if found != said:
                say(f"waiting for workers: {found}")
                said = found
            self._rest(min(_ASK_SECS, max(0.0, until_secs - time.monotonic())))

    def _attempt(self, number: int, places: Places) -> tuple[Gang, Outcome]:
        gang = self._gang(number, places)
        outcome = self._run(gang)
        lost = _port_clash(gang, outcome) if not self._signals.received else None
        if lost:
            say(
                f"{name(lost)} could not bind its port ({lost.address}); "
                "starting all workers once more, on other ports"
            )
            again = self._places(shift=1)
            if isinstance(again, Places):
                gang = self._gang(number, again)
                outcome = self._run(gang)
        return gang, outcome

    def _gang(self, number: int, places: Places) -> Gang:
        told = {"CTL_ATTEMPT": str(number)}
        told["CTL_STARTUP_TIMEOUT_SECS"] = f"{self._settings.timeouts.startup:g}"
        told |= {"CTL_RESTART_REASON": self._reason} if self._reason else {}
        told |= {lease.DEAD_HOLDERS: dead} if (dead := lease.found_dead()) else {}

        def environ(task: Cluster) -> Mapping[str, str]:
            return {**told, "CTL_HEARTBEAT": str(self._pulse.path(task))}

        self._pulse.begin(places.tasks)
        return Gang(
            self._command, places.tasks, self._log_dir, far=places.far, environ=environ,
            private=self._private, most_log_bytes=self._settings.most_log_bytes,
        )  # fmt: skip

    def _run(self, gang: Gang) -> Outcome:
        grace_secs, signals = self._settings.grace_secs, self._signals
        watch = Watch(gang, grace_secs, signals, self._pulse)
        try:
            gang.start()
            outcome = watch.wait()
            if outcome.stragglers and all(map(serves, outcome.stragglers)):
                gang.end(
                    min(grace_secs, _SERVER_SECS), hurry=signals.impatient, only=outcome.stragglers
                )
                outcome = watch.wait()
            if _port_clash(gang, outcome):
                grace_secs = 0.0  # nothing to save yet, and TensorFlow sits it out
            elif outcome.stragglers or (outcome.cause and _lost(outcome.cause)):
                grace_secs = min(grace_secs, _LOST_SECS)
            if gang.running:
                say(_why_ending(gang, outcome, grace_secs, self._settings.grace_secs))
            self._end(gang, outcome, grace_secs)
            for task in gang.tasks:
                self._pulse.read(task)  # a short life may have gone by between two looks
        except BaseException:
            gang.end(0.0)
            raise
        return outcome

    def _end(self, gang: Gang, outcome: Outcome, grace_secs: float) -> None:
        """Ends what runs; those that serve come last, because the chief saves what they hold."""
        signum = outcome.signum or signal.SIGTERM
        hurry = self._signals.impatient
        if outcome.cause and _lost(outcome.cause) and grace_secs:
            until_secs = time.monotonic() + grace_secs
            grace_secs = min(self._settings.grace_secs, _LONGEST_SAVE_SECS)

            def hurry() -> bool:
                late = time.monotonic() >= until_secs and not self._pulse.is_saving(gang.running)
                return late or self._signals.impatient()

        if any(map(serves, gang.running)):
            first = [t for t in gang.running if not serves(t)]
            gang.end(grace_secs, signum, hurry, only=first)
            signum, grace_secs = signal.SIGTERM, min(grace_secs, _SERVER_SECS)
        gang.end(grace_secs, signum, hurry)

    def _record(self, number: int, places: Places) -> Attempt:
        return Attempt(
            attempt=number, started=time.time(), step_before=self._step(), hosts=places.hosts,
            workers=sum(t.task_type in ("chief", "worker") for t in places.tasks),
        )  # fmt: skip

    def _step(self) -> int | None:
        """How far the job is; None if neither checkpoints nor heartbeats tell."""
        step, highest = newest_step(self._settings.model_dir), self._pulse.highest_step
        if step is None and highest is not None:
            return 0 if self._settings.model_dir else highest
        return step

    def _judge(self, outcome: Outcome, record: Attempt) -> Verdict:
        """What comes next, noted in the record."""
        record.ended, record.step_after = time.time(), self._step()
        cause, verdict = outcome.cause, Verdict()
        if cause and not self._signals.received:
            verdict = self._policy.after(
                cause.exit_code, record.step_after, loss=cause.loss,
                trained=self._pulse.has_trained(cause.task),
            )  # fmt: skip
            self._reason = cause.reason
        if cause:
            record.reason, record.detected_secs = cause.reason, cause.silent_secs
            record.failed = {
                "task": f"{cause.task.task_type} {cause.task.task_index}",
                "job": cause.task.worker_index if trains(cause.task) else None,
                "exit_code": cause.exit_code, "signal": cause.signal_name,
            }  # fmt: skip
        elif outcome.stragglers:
            record.reason = "did not end by themselves: " + ", ".join(map(name, outcome.stragglers))
        if self._signals.received:
            signame = signal.Signals(self._signals.received[0]).name
            record.reason = record.reason if cause else f"{signame} to the launcher"
            record.next = f"no restart: {signame} came"
        elif verdict.delay_secs is not None:
            record.next = f"restart in {verdict.delay_secs:g} s"
        elif cause:
            record.next = f"no restart: {verdict.why_not}"
        if verdict.is_news:
            say(f"{verdict.why_not}; not started again")
        return verdict

    def _tell_size(self, places: Places) -> None:
        count, before = len(places.tasks), self._workers
        self._workers = count
        if not before:
            say(f"starting {count} process{'es' if count > 1 else ''}, logs in {self._log_dir}")
        elif before != count:
            said = [f"{n} worker{'s' if n > 1 else ''}" for n in (before, count)]
            say(" → ".join(said))

    def _tell_restart(self, outcome: Outcome, number: int, delay_secs: float) -> None:
        if outcome.cause is None:
            return
        kept = self._log_dir / earlier_name(outcome.cause.task, number)
        hint = f" ({outcome.cause.hint})" if outcome.cause.hint else ""
        say(f"{outcome.cause.reason}; its log will be {kept}{hint}")
        used = f"{self._policy.restarts} of {self._policy.max_restarts}"
        say(f"restart {used} in {delay_secs:g} s: {outcome.cause.reason}")

    def _rest(self, secs: float) -> bool:
        """Waits; False, at once, when a signal came."""
        until_secs = time.monotonic() + secs
        while not self._signals.received and time.monotonic() < until_secs:
            time.sleep(_POLL_SECS)
        return not self._signals.received


def _lost(cause: Exit) -> bool:
    """True when what remains of the job has lost a peer, and so has nothing that it could save."""
    return cause.exit_code >= 128 and cause.exit_code not in (EXIT_INTERRUPTED, EXIT_PREEMPTED)


def _why_ending(gang: Gang, outcome: Outcome, grace_secs: float, waited_secs: float) -> str:
    if outcome.signum:
        signame = signal.Signals(outcome.signum).name
        told = [t for t in gang.running if not serves(t)]
        servers = len(gang.running) - len(told)
        after = f"; {servers} that serve are ended after them" if servers else ""
        return (
            f"{signame} passed on to {len(told)} processes, SIGKILL follows after "
            f"{grace_secs:g} s or a second signal{after}"
        )
    if outcome.cause:
        why = f"{name(outcome.cause.task)} failed"
    else:
        why = f"{name(gang.tasks[0])} is done but others still run after {waited_secs:g} s"
    names = ", ".join(map(name, gang.running))
    return f"{why}; ending {names} with SIGTERM, and SIGKILL after {grace_secs:g} s"


def _conclude(gang: Gang, outcome: Outcome) -> int:
    """Says how the job ended, if not well, and returns its exit code."""
    if outcome.cause:
        task, log = outcome.cause.task, gang.log(outcome.cause.task)
        hint = f" ({outcome.cause.hint})" if outcome.cause.hint else ""
        say(f"{name(task)} failed first: {outcome.cause}; its log is {log}{hint}")
        if task != gang.tasks[0]:  # the chief's was on the console all along
            with contextlib.suppress(OSError):
                print(tail(log), file=sys.stderr, flush=True)
        return outcome.cause.exit_code
    if outcome.signum and (failures(gang) or late(gang) or gang.running):
        say("ended: " + ", ".join(f"{name(e.task)} {e}" for e in gang.exits))
        return 128 + outcome.signum
    if outcome.stragglers:
        names = ", ".join(map(name, outcome.stragglers))
        say(f"warning: the chief was done, {names} did not end by themselves; the job is complete")
    elif ends := late(gang):
        said = ", ".join(f"{name(e.task)} ended with {e}" for e in ends)
        say(f"warning: {said} after the chief was done; the job is complete")
    return EXIT_DONE


def _port_clash(gang: Gang, outcome: Outcome) -> Cluster | None:
    """The first process whose port was taken, if that is why the job failed."""
    if not outcome.cause:
        return None
    return next((e.task for e in gang.failures if clashed(gang, e)), None)
