"""Starts the processes of one job on this machine, watches them and ends them together.

    exit_code = launch(["python", "train.py"], roles=Roles(workers=2), host="127.0.0.1",
                       log_dir=Path("logs"), grace_secs=30.0)

`Gang` starts and ends processes, `Watch` decides when it is time to, `launch` puts both together
and says what happened. Call it from the main thread: signals are delivered there.
"""

import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctl.cluster import Cluster
from ctl.errors import EXIT_DONE, EXIT_FAILED
from ctl.launch.gang import Gang
from ctl.launch.logs import tail
from ctl.launch.ports import free_ports
from ctl.launch.roles import name, serves
from ctl.launch.watching import Outcome, PassedOnSignals, Watch, clashed, failures, say

_SERVER_SECS = 5.0  # from SIGTERM to SIGKILL for what has no state to save


@dataclass(frozen=True, kw_only=True)
class Roles:
    """How many processes of each kind; without a chief worker 0 is the chief."""

    workers: int
    chief: bool = False
    ps: int = 0
    evaluator: bool = False

    @property
    def count(self) -> int:
        """All of them."""
        return self.workers + self.chief + self.ps + self.evaluator


def plan(roles: Roles, host: str) -> list[Cluster]:
    """The places in the cluster, one per process and the chief's first, on free ports of `host`."""
    counts = {
        "chief": int(roles.chief), "worker": roles.workers, "ps": roles.ps,
        "evaluator": int(roles.evaluator),
    }  # fmt: skip
    addresses = iter([f"{host}:{port}" for port in free_ports(roles.count, host)])
    tasks = {kind: tuple(next(addresses) for _ in range(n)) for kind, n in counts.items() if n}
    return [Cluster(tasks, kind, i) for kind, places in tasks.items() for i in range(len(places))]


def launch(
    command: Sequence[str], *, roles: Roles, host: str, log_dir: Path, grace_secs: float
) -> int:
    """Runs `command` once per process until all have ended; returns the exit code for the job.

    That is 0 if all that train ended with 0, the first failing one's code (128+n for signal n), or
    130 and 143 after a SIGINT or SIGTERM to us. Raises UsageError when nothing could be started.
    When a process lost its port to another program, all are started once more on other ports.
    """
    with PassedOnSignals() as signals:
        gang = Gang(command, plan(roles, host), log_dir)
        outcome = _run(gang, grace_secs, signals)
        lost = _port_clash(gang, outcome) if not signals.received else None
        if lost:
            say(
                f"{name(lost)} could not bind its port ({lost.address}); "
                "starting all workers once more, on other ports"
            )
            gang = Gang(command, plan(roles, host), log_dir)
            outcome = _run(gang, grace_secs, signals)
        return _conclude(gang, outcome)


def _run(gang: Gang, grace_secs: float, signals: PassedOnSignals) -> Outcome:
    watch = Watch(gang, grace_secs, signals)
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
        if gang.running:
            say(_why_ending(gang, outcome, grace_secs))
        _end(gang, outcome, grace_secs, signals)
    except BaseException:
        gang.end(0.0)
        raise
    return outcome


def _end(gang: Gang, outcome: Outcome, grace_secs: float, signals: PassedOnSignals) -> None:
    """Ends what runs; those that serve come last, because the chief saves what they hold."""
    signum = outcome.signum or signal.SIGTERM
    if any(map(serves, gang.running)):
        first = [t for t in gang.running if not serves(t)]
        gang.end(grace_secs, signum, signals.impatient, only=first)
        signum, grace_secs = signal.SIGTERM, min(grace_secs, _SERVER_SECS)
    gang.end(grace_secs, signum, signals.impatient)


def _why_ending(gang: Gang, outcome: Outcome, grace_secs: float) -> str:
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
    if outcome.signum and (failures(gang) or gang.running):
        say("ended: " + ", ".join(f"{name(e.task)} {e}" for e in gang.exits))
        return 128 + outcome.signum
    if outcome.stragglers:
        say("did not end by themselves: " + ", ".join(map(name, outcome.stragglers)))
        return EXIT_FAILED
    return EXIT_DONE


def _port_clash(gang: Gang, outcome: Outcome) -> Cluster | None:
    """The first process whose port was taken, if that is why the job failed."""
    if not outcome.cause:
        return None
    return next((e.task for e in gang.failures if clashed(gang, e)), None)
