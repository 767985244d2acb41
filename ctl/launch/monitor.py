"""Watches a gang, and decides when it is time to end it and for what reason.

    with PassedOnSignals() as signals:
        outcome = Watch(gang, grace_secs=30.0, signals=signals, pulse=pulse).wait()

A worker of a job with parameter servers that dies is started again here, and what is hung is killed;
else nothing is started or ended. Call it from the main thread: signals are delivered there.
"""

import contextlib
import signal
import time
from dataclasses import dataclass

from ctl.distribute.cluster import Cluster
from ctl.errors import EXIT_RETRY
from ctl.io.console import say
from ctl.launch.heartbeats import Pulse
from ctl.launch.process_group import Gang
from ctl.launch.processes import Exit
from ctl.launch.roles import may_die, name, serves, trains

_POLL_SECS = 0.05
_CAUSE_SECS = 3.0  # after "lost a peer": time for that peer to be seen ending itself
_PORT_CLASH = b"Could not start gRPC server"
_PORT_CLASH_SECS = 30.0  # workers import TensorFlow before they bind
RESTART_SECS = (1.0, 2.0, 4.0)  # before each new start of one worker; as many starts as these


class PassedOnSignals:
    """Keeps the SIGINT and SIGTERM that arrive inside its `with` block, instead of ending us.

    An ignored SIGCHLD, which some parents leave us, would lose exit codes; it is put right too.
    """

    def __init__(self):
        self.received: list[int] = []
        self._handlers = {}

    def __enter__(self) -> "PassedOnSignals":
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._handlers[signum] = signal.signal(signum, lambda n, _: self.received.append(n))
        self._handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def impatient(self) -> bool:
        """True from the second signal on: no more waiting."""
        return len(self.received) > 1


@dataclass(frozen=True)
class Outcome:
    """Why watching ended: a failure, a signal to us, processes that outlived the chief, or none."""

    cause: Exit | None = None
    signum: int | None = None
    stragglers: tuple[Cluster, ...] = ()


def failures(gang: Gang) -> list[Exit]:
    """The exits that make the job a failure, first noticed first.

    An evaluator's never does, nor that of a worker that only serves. Once the chief is done the job is
    complete: then only an error that a worker's own program reports (exit codes up to 127) counts.
    """
    done = any(e.task == gang.tasks[0] and e.returncode == 0 for e in gang.exits)
    return [e for e in gang.failures if not may_die(e.task) and not (done and _is_late(e))]


def late(gang: Gang) -> list[Exit]:
    """The exits that are only worth a warning: of processes that were lost after the chief was done."""
    counted = failures(gang)
    return [e for e in gang.failures if trains(e.task) and e not in counted]


def _is_late(end: Exit) -> bool:
    return serves(end.task) or end.exit_code >= 128


def clashed(gang: Gang, end: Exit) -> bool:
    """True for a process that failed early and whose log says that its port was taken."""
    with contextlib.suppress(OSError):
        early = end.returncode != 0 and end.lived_secs <= _PORT_CLASH_SECS
        return early and _PORT_CLASH in gang.log(end.task).read_bytes()
    return False


class Watch:
    """One look after a gang, from its start to its end; `wait` may be called again to go on."""

    def __init__(
        self, gang: Gang, grace_secs: float, signals: PassedOnSignals, pulse: Pulse | None = None
    ):
        self._gang = gang
        self._pulse = pulse
        self._chief = gang.tasks[0]
        self._grace_secs = grace_secs
        self._signals = signals
        self._looked_at = 0  # so many exits of the gang
        self._starts: dict[int, int] = {}  # worker -> how often it was started again
        self._due: dict[int, tuple[float, Exit]] = {}  # worker -> when it will be, after which end
        self._chief_done_secs: float | None = None  # time.monotonic
        self._told_waiting = False

    def wait(self) -> Outcome:
        """Waits until the gang has ended or has to be ended.

        Processes may outlive a chief that is done by the grace period, and evaluators by any time.
        """
        while True:
            self._gang.poll()
            if self._signals.received:
                return Outcome(signum=self._signals.received[0])
            cause = self._first_cause() if failures(self._gang) else self._without_them()
            cause = cause or self._hung()
            if cause is not None:
                return Outcome(cause=cause)
            if not self._gang.running and not self._due:
                return Outcome()
            if self._chief not in self._gang.running and self._overdue():
                others = tuple(t for t in self._gang.running if t.task_type != "evaluator")
                if others:
                    return Outcome(stragglers=others)
                self._tell_waiting()
            time.sleep(_POLL_SECS)

    def _overdue(self) -> bool:
        now_secs = time.monotonic()
        self._chief_done_secs = self._chief_done_secs or now_secs
        self._due.clear()
        return now_secs - self._chief_done_secs >= self._grace_secs

    def _tell_waiting(self) -> None:
        if not self._told_waiting and self._gang.running:
            self._told_waiting = True
            names = ", ".join(map(name, self._gang.running))
            say(f"training is done; waiting for {names} to evaluate the rest (Ctrl-C ends it)")

    def _first_cause(self) -> Exit | None:
        """The failure that the others followed from; None if it was none after all.

        A worker that lost a peer often ends before that peer does, with EXIT_RETRY, or with SIGABRT
        from TensorFlow, which is the same number. So the first other code wins, if one comes in time.
        A parameter server may lose a chief that is done, and be seen to end before it.
        """
        until_secs = time.monotonic() + _CAUSE_SECS
        while failed := failures(self._gang):
            for failure in failed:
                served = serves(failure.task) and self._chief in self._gang.running
                if failure.exit_code != EXIT_RETRY and not served:
                    return failure
            stopped = self._stopped_peer()
            if stopped is not None:
                return stopped
            late = time.monotonic() >= until_secs
            if not self._gang.running or self._signals.received or late:
                return failed[0]
            time.sleep(_POLL_SECS)
            self._gang.poll()
        return None

    def _stopped_peer(self) -> Exit | None:
        """A process that the kernel has stopped, killed at once, when others have lost a peer."""
        task = next((t for t in self._gang.stopped if not may_die(t)), None)
        if task is None:
            return None
        say(f"{name(task)} is stopped, as after SIGSTOP; others lost it, so it is killed")
        self._gang.kill(task)
        return Exit(task, EXIT_RETRY, 0.0, "was stopped, as after SIGSTOP, and lost by its peers")

    def _hung(self) -> Exit | None:
        """The end of the attempt if a process is hung; one that may die is only killed."""
        gang, pulse = self._gang, self._pulse
        if pulse is None or not pulse.is_due:
            return None
        hang = pulse.look(gang.running, gang.stopped, gang.far, gang.cpu_ticks)
        if hang is None:
            return None
        say(f"{name(hang.task)} {hang.why}; it is killed")
        gang.kill(hang.task)
        if may_die(hang.task):
            return None
        return Exit(hang.task, EXIT_RETRY, 0.0, hang.why, hang.silent_secs)

    def _without_them(self) -> Exit | None:
        """Deals with those that may die; returns an end after which the job cannot go on."""
        news = self._gang.exits[self._looked_at :]
        self._looked_at = len(self._gang.exits)
        for end in news:
            if not may_die(end.task) or end.returncode == 0:
                continue
            if end.task.task_type == "evaluator":
                say(
                    f"{name(end.task)} failed: {end}; the training does not depend on it; "
                    f"its log is {self._gang.log(end.task)}"
                )
            elif self._chief in self._gang.running:
                if clashed(self._gang, end) and not self._starts.get(end.task.task_index):
                    return end
                self._plan(end)
        self._start_again()
        return self._nobody_left(news)

    def _plan(self, end: Exit) -> None:
        index = end.task.task_index
        count = self._starts.get(index, 0)
        if count == len(RESTART_SECS):
            say(
                f"{name(end.task)} ended with {end} after {count} new starts; the job goes on "
                f"without it; its log is {self._gang.log(end.task)}"
            )
            return
        self._starts[index] = count + 1
        self._due[index] = (time.monotonic() + RESTART_SECS[count], end)
        say(
            f"{name(end.task)} ended with {end}; the job goes on, and it is started again in "
            f"{RESTART_SECS[count]:g} s ({count + 1} of {len(RESTART_SECS)})"
        )

    def _start_again(self) -> None:
        for index, (at_secs, end) in list(self._due.items()):
            if time.monotonic() >= at_secs and self._chief in self._gang.running:
                del self._due[index]
                if self._pulse:
                    self._pulse.forget(end.task)
                self._gang.restart(end)

    def _nobody_left(self, news: list[Exit]) -> Exit | None:
        """The newest end, if the chief has no worker any more and will get none."""
        there = [t for t in self._gang.running if serves(t) and t.task_type == "worker"]
        if there or self._due or self._chief not in self._gang.running:
            return None
        dead = [e for e in news if e.returncode != 0 and may_die(e.task) and serves(e.task)]
        return dead[-1] if dead else None
