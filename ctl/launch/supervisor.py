"""Starts the workers of one job on this machine, watches them and ends them: all or none.

    exit_code = launch(["python", "train.py"], workers=2, with_chief=False, host="127.0.0.1",
                       log_dir=Path("logs"), grace_secs=30.0)

`Gang` starts and ends processes, `watch` decides when it is time to, `launch` puts both together
and says what happened. Call it from the main thread: signals are delivered there.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctl.cluster import Cluster
from ctl.errors import EXIT_DONE, EXIT_FAILED, EXIT_RETRY
from ctl.launch.gang import Exit, Gang, name
from ctl.launch.logs import tail
from ctl.launch.ports import free_ports

_POLL_SECS = 0.05
_CAUSE_SECS = 3.0  # after "lost a peer": time for that peer to be seen ending itself
_PORT_CLASH = b"Could not start gRPC server"
_PORT_CLASH_SECS = 30.0  # workers import TensorFlow before they bind


def say(text: str) -> None:
    """Writes one line to stderr; a stderr that is gone is no reason to leave workers alone."""
    with contextlib.suppress(OSError):
        print(f"ctl launch: {text}", file=sys.stderr, flush=True)


def plan(*, workers: int, with_chief: bool, host: str) -> list[Cluster]:
    """The places in the cluster, one per process and the chief's first, on free ports of `host`.

    With a chief there is one process more than `workers`.
    """
    addresses = [f"{host}:{port}" for port in free_ports(workers + with_chief, host)]
    chiefs, others = tuple(addresses[:with_chief]), tuple(addresses[with_chief:])
    tasks = {"chief": chiefs, "worker": others} if with_chief else {"worker": others}
    return [Cluster(tasks, kind, i) for kind, places in tasks.items() for i in range(len(places))]


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
    """Why watching ended: a failure, a signal to us, workers that outlived the chief, or none."""

    cause: Exit | None = None
    signum: int | None = None
    stragglers: tuple[Cluster, ...] = ()


def watch(gang: Gang, grace_secs: float, signals: PassedOnSignals) -> Outcome:
    """Waits until the gang has ended or has to be ended; ends nothing itself.

    Workers may outlive a chief that is done by `grace_secs`.
    """
    chief, chief_done_secs = gang.tasks[0], None
    while True:
        gang.poll()
        if signals.received:
            return Outcome(signum=signals.received[0])
        if gang.failures:
            return Outcome(cause=_first_cause(gang, signals))
        if not gang.running:
            return Outcome()
        now_secs = time.monotonic()
        if chief not in gang.running:
            chief_done_secs = chief_done_secs or now_secs
            if now_secs - chief_done_secs >= grace_secs:
                return Outcome(stragglers=gang.running)
        time.sleep(_POLL_SECS)


def _first_cause(gang: Gang, signals: PassedOnSignals) -> Exit:
    """The failure that the others followed from.

    A worker that lost a peer often ends before that peer does, with EXIT_RETRY, or with SIGABRT
    from TensorFlow, which is the same number. So the first other code wins, if one comes in time.
    """
    until_secs = time.monotonic() + _CAUSE_SECS
    while True:
        for failure in gang.failures:
            if failure.exit_code != EXIT_RETRY:
                return failure
        if not gang.running or signals.received or time.monotonic() >= until_secs:
            return gang.failures[0]
        time.sleep(_POLL_SECS)
        gang.poll()


def launch(
    command: Sequence[str],
    *,
    workers: int,
    with_chief: bool,
    host: str,
    log_dir: Path,
    grace_secs: float,
) -> int:
    """Runs `command` once per worker until all have ended; returns the exit code for the job.

    That is 0 if all ended with 0, the first failing worker's code (128+n for signal n), or 130 and
    143 after a SIGINT or SIGTERM to us. Raises UsageError when nothing could be started. When a
    worker lost its port to another program, all are started once more on other ports.
    """

    def gang_on_free_ports() -> Gang:
        return Gang(command, plan(workers=workers, with_chief=with_chief, host=host), log_dir)

    with PassedOnSignals() as signals:
        gang = gang_on_free_ports()
        outcome = _run(gang, grace_secs, signals)
        clashed = _port_clash(gang) if outcome.cause and not signals.received else None
        if clashed:
            say(
                f"{name(clashed)} could not bind its port ({clashed.address}); "
                "starting all workers once more, on other ports"
            )
            gang = gang_on_free_ports()
            outcome = _run(gang, grace_secs, signals)
        return _conclude(gang, outcome)


def _run(gang: Gang, grace_secs: float, signals: PassedOnSignals) -> Outcome:
    try:
        gang.start()
        outcome = watch(gang, grace_secs, signals)
        if outcome.cause and _port_clash(gang):
            grace_secs = 0.0  # nothing to save yet, and TensorFlow sits it out
        if gang.running:
            say(_why_ending(gang, outcome, grace_secs))
        gang.end(grace_secs, outcome.signum or signal.SIGTERM, signals.impatient)
    except BaseException:
        gang.end(0.0)
        raise
    return outcome


def _why_ending(gang: Gang, outcome: Outcome, grace_secs: float) -> str:
    if outcome.signum:
        signame = signal.Signals(outcome.signum).name
        return (
            f"{signame} passed on to {len(gang.running)} processes, SIGKILL follows after "
            f"{grace_secs:g} s or a second signal"
        )
    if outcome.cause:
        why = f"{name(outcome.cause.task)} failed"
    else:
        why = f"{name(gang.tasks[0])} is done but others still run after {grace_secs:g} s"
    names = ", ".join(map(name, gang.running))
    return f"{why}; ending {names} with SIGTERM, and SIGKILL after {grace_secs:g} s"


def _conclude(gang: Gang, outcome: Outcome) -> int:
    """Says how the job ended, if not well, and returns its exit code."""
    if outcome.cause:
        task, log = outcome.cause.task, gang.log(outcome.cause.task)
        say(f"{name(task)} failed first: {outcome.cause}; its log is {log}")
        if task != gang.tasks[0]:  # the chief's was on the console all along
            with contextlib.suppress(OSError):
                print(tail(log), file=sys.stderr, flush=True)
        return outcome.cause.exit_code
    if outcome.signum and (gang.failures or gang.running):
        say("ended: " + ", ".join(f"{name(e.task)} {e}" for e in gang.exits))
        return 128 + outcome.signum
    if outcome.stragglers:
        say("did not end by themselves: " + ", ".join(map(name, outcome.stragglers)))
        return EXIT_FAILED
    return EXIT_DONE


def _port_clash(gang: Gang) -> Cluster | None:
    """The first process that failed early and whose log says that its port was taken."""
    for failure in gang.failures:
        with contextlib.suppress(OSError):
            log = gang.log(failure.task).read_bytes()
            if failure.lived_secs <= _PORT_CLASH_SECS and _PORT_CLASH in log:
                return failure.task
    return None
