"""Runs a job of a fixed number of ranks: the first that fails ends all.

exit_code = run(job, seats(None, 2))
"""

import contextlib
import signal
import time
from collections.abc import Sequence

from ctl.errors import EXIT_DONE, EXIT_RETRY
from ctl.launch.horovodrun.console import say
from ctl.launch.horovodrun.environment import of_gpu, of_place
from ctl.launch.horovodrun.heartbeats import Heartbeats
from ctl.launch.horovodrun.host_allocation import Seat
from ctl.launch.horovodrun.jobs import FAILED_SECS, GRACE_SECS, Job, how, lost_a_peer
from ctl.launch.horovodrun.ranks import Ranks
from ctl.launch.monitor import PassedOnSignals
from ctl.launch.processes import Exit

_POLL_SECS = 0.05
_CAUSE_SECS = 3.0  # after "lost a peer": time for that peer to be seen ending itself


def run(job: Job, seats: Sequence[Seat]) -> int:
    """Starts a process per seat and waits; the exit code is the first failing one's, or 0.

    That is 128+n for signal n, and 130 or 143 after a SIGINT or SIGTERM to us.
    """
    environs = [_environ(job, seat) for seat in seats]
    beats = Heartbeats(job.heartbeat_timeout_secs)
    with contextlib.closing(beats), PassedOnSignals() as signals:
        ranks = Ranks(job.command, job.output, door=job.door)
        try:
            for seat, environ in zip(seats, environs, strict=True):
                if job.says:
                    say(f"rank {seat.place.rank} on {seat.host}: {' '.join(job.command)}")
                private = {**(job.far if seat.far else {}), **job.private}
                told = {} if seat.far else beats.told(seat.task)
                ranks.start(seat.task, {**environ, **told}, private=private, host=seat.far)
            job.output.start()
            cause = _wait(ranks, job, signals, beats)
            _end(ranks, cause, signals)
        except BaseException:
            ranks.end(0.0)
            raise
    return _conclude(ranks, cause, signals)


def _environ(job: Job, seat: Seat) -> dict[str, str]:
    environ = {**job.told, **of_place(seat.place, seat.host)}
    if job.binds_gpus:
        gpu = of_gpu(seat.place.local_rank, is_here=seat.far is None)
        environ["CUDA_VISIBLE_DEVICES"] = gpu
    return environ


def _wait(ranks: Ranks, job: Job, signals: PassedOnSignals, beats: Heartbeats) -> Exit | None:
    """Until all have ended with 0, one has failed or hangs, or a signal came; returns the failure."""
    while ranks.running and not signals.received:
        ranks.poll()
        if any(end.returncode for end in ranks.exits):
            return _first_cause(ranks, job)
        hang = beats.hung(ranks)
        if hang:
            ranks.send(hang.task.task_index, signal.SIGKILL)
            return Exit(hang.task, EXIT_RETRY, 0.0, hang.why, hang.silent_secs)
        time.sleep(_POLL_SECS)
    return None


def _first_cause(ranks: Ranks, job: Job) -> Exit:
    """The failure that others followed from: not of one that only says that it lost a peer."""
    until_secs = time.monotonic() + _CAUSE_SECS
    while True:
        failed = [end for end in ranks.exits if end.returncode]
        for end in failed:
            last_words = job.output.last_error(end.task.task_index)
            if end.signal_name or end.why or not lost_a_peer(last_words):
                return end
        if not ranks.running or time.monotonic() > until_secs:
            return failed[0]
        time.sleep(_POLL_SECS)
        ranks.poll()


def _end(ranks: Ranks, cause: Exit | None, signals: PassedOnSignals) -> None:
    left = [number for number in ranks.running if cause and number != cause.task.task_index]
    if cause and left:
        others = ", ".join(map(str, left))
        say(f"rank {cause.task.task_index} {how(cause)}; ending {others} with it")
    grace_secs = FAILED_SECS if cause else GRACE_SECS
    signum = signals.received[0] if signals.received else signal.SIGTERM
    ranks.end(grace_secs, signum, hurry=lambda: len(signals.received) > (1 if not cause else 0))


def _conclude(ranks: Ranks, cause: Exit | None, signals: PassedOnSignals) -> int:
    if cause:
        say(f"rank {cause.task.task_index} {how(cause)} (it was the first to)")
        return cause.exit_code
    if signals.received and (ranks.running or any(end.returncode for end in ranks.exits)):
        say("ended by " + signal.Signals(signals.received[0]).name)
        return 128 + signals.received[0]
    return EXIT_DONE
