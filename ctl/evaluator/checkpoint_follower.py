"""Iteration over the checkpoints of a training that another process runs, until that training ends.

`Following` chooses the next checkpoint, waits, and detects the end. The caller evaluates each checkpoint.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.watched import UnusableCheckpoint, WatchedCheckpoints
from ctl.errors import EXIT_PREEMPTED, EXIT_RETRY, PeerLostError, ReadError
from ctl.io import paths
from ctl.supervision.beat_file import BeatReader, Beats
from ctl.supervision.lease import ENDED, Holder, Lease

POLL_SECS = 1.0
BEGIN_SECS = 600.0
BEAT_SECS = 30.0
UNREAD_SECS = 60.0
_CLOSING_SECS = 3.0  # in which an evaluator closes its writers
_log = logging.getLogger("ctl")


class Evaluated:
    """List of evaluated checkpoints in a JSON file: step -> Unix time at which the checkpoint was created.

    A checkpoint that is saved again at the same step has another time. An unreadable file counts as empty,
    and a file that cannot be written causes one warning.

    Attributes:
      content: Content of the file when it was read. Each evaluation and each beat changes it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = paths.path(path)
        self._created_by_step: dict[str, float] = {}
        self._has_warned = False
        self._writing = threading.Lock()
        self.content = ""
        try:
            self.content = self._path.read_bytes().decode()
            content = json.loads(self.content)["evaluated"]
            self._created_by_step = {str(step): float(created) for step, created in content.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            _log.warning("%s cannot be read (%r); every checkpoint counts as new.", self._path, e)

    def __contains__(self, manifest: Manifest) -> bool:
        return self._created_by_step.get(str(manifest.step)) == manifest.created

    def add(self, manifest: Manifest) -> None:
        """Adds a checkpoint, also for later processes."""
        self._created_by_step[str(manifest.step)] = manifest.created
        self._write({})

    @contextlib.contextmanager
    def beating(self, step: int, beat_secs: float = BEAT_SECS) -> Iterator[None]:
        """Records every `beat_secs` seconds within the block that the checkpoint of `step` is evaluated."""
        beats = Beats(
            lambda: self._write({"evaluating": step, "beat": time.time()}),
            secs=beat_secs,
            name="ctl-evaluating",
        )
        beats.start()
        try:
            yield
        finally:
            beats.stop(wait=True)

    def _write(self, activity: dict[str, Any]) -> None:
        text = json.dumps({"evaluated": self._created_by_step, **activity}) + "\n"
        try:
            with self._writing:
                paths.write_atomically(self._path, text)
        except OSError as e:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s cannot be written (%s); an evaluator that is started again will evaluate the "
                    "same checkpoints again.",
                    self._path,
                    e.strerror or e,
                )


def wait_for_evaluator(
    watched: WatchedCheckpoints,
    path: str | os.PathLike[str],
    *,
    patience_secs: float = BEGIN_SECS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits until another process has evaluated the newest checkpoint, or has become silent.

    The chief calls it on platforms that end all processes with the chief.

    Args:
      watched: Checkpoints of the training.
      path: File of the evaluator's `Evaluated`.
      patience_secs: Seconds without an evaluation or a beat after which a warning is logged.
      clock: Clock (seconds).
      sleep: Function that sleeps for some seconds.

    Returns:
      True if the newest checkpoint is evaluated.
    """
    try:
        newest = max(watched.committed(), key=lambda m: m.step, default=None)
    except ReadError as e:
        _log.warning("%s Exiting without waiting for the evaluator.", e)
        return False
    if newest is None or newest in Evaluated(path):
        return newest is not None
    _log.info("Waiting for the evaluator: this platform ends all processes with the chief.")
    reader = BeatReader(clock)
    while reader.silent_secs < patience_secs:
        evaluated = Evaluated(path)
        if newest in evaluated:
            sleep(_CLOSING_SECS)
            return True
        reader.read(evaluated.content)
        sleep(POLL_SECS)
    _log.warning(
        "The evaluator has not evaluated step %d and reports no progress for %g s; exiting without it.",
        newest.step,
        patience_secs,
    )
    return False


@dataclass(frozen=True)
class Patience:
    """Waiting times of an evaluator (seconds).

    Attributes:
      poll_secs: Time between two polls.
      begin_secs: Time for a training to begin.
      unread_secs: Time for an unreadable file or directory to become readable.
    """

    poll_secs: float = POLL_SECS
    begin_secs: float = BEGIN_SECS
    unread_secs: float = UNREAD_SECS


class Following:
    """Iteration of one evaluator over the checkpoints of a training.

    Args:
      watched: Checkpoints of the training.
      lease: Lease of the training.
      evaluated: List of evaluated checkpoints.
      born: Unix time at which this process began.
      patience: Waiting times.
      clock: Clock (seconds).
      sleep: Function that sleeps for some seconds.

    Attributes:
      count: Number of checkpoints evaluated by this process.
      step: Step of the newest of them, or None.
    """

    def __init__(
        self,
        watched: WatchedCheckpoints,
        lease: Lease,
        evaluated: Evaluated,
        *,
        born: float,
        patience: Patience = Patience(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.count = 0
        self.step: int | None = None
        self._watched = watched
        self._lease = lease
        self._evaluated = evaluated
        self._born = born
        self._patience = patience
        self._clock = clock
        self._sleep = sleep
        self._first: Holder | None = None  # at its first poll
        self._has_polled = False
        self._began: tuple | None = None  # identity of a training that appeared after the first poll
        self._alive: tuple | None = None  # identity of a training with a new beat
        self._unusable: set[tuple[int, float]] = set()
        self._pending: dict[int, Manifest] = {}
        self._unread_since: float | None = None  # by the clock; None after a successful read

    def run(self, evaluate: Callable[[Manifest], None], stopped: Callable[[], bool]) -> str:
        """Calls `evaluate` for each checkpoint, the oldest first.

        Args:
          evaluate: Evaluates a checkpoint.
          stopped: Returns True to end the iteration.

        Returns:
          The reason for which the training ended, or "stopped".

        Raises:
          PeerLostError: After the last checkpoint, if the training died, was preempted, or never began.
          ReadError: If checkpoints cannot be read.
        """
        waiting_since = self._clock()
        while not stopped():
            gone = self._ended_training()  # before the list of checkpoints: the last one precedes the end
            try:
                manifest = self._next()
                if manifest is not None:
                    self._evaluate(manifest, evaluate)
                    waiting_since = self._clock()
                    continue
                if self._watched.unread is None:
                    self._unread_since = None
                holder, is_ours = gone
                if holder is not None and is_ours:
                    if self._watched.unread is not None:
                        raise self._watched.unread
                    return self._reason(holder)
            except ReadError as e:
                self._wait_until_readable(e)
                continue
            if holder is None and is_ours:
                waiting_since = self._clock()
            if self._clock() - waiting_since > self._patience.begin_secs:
                raise PeerLostError(
                    f"No training started in {self._watched.directory.parent} within "
                    f"{self._patience.begin_secs:g} s; expected a running chief. Start it, "
                    "then the evaluator again."
                )
            self._sleep(self._patience.poll_secs)
        return "stopped"

    def _wait_until_readable(self, error: ReadError) -> None:
        """Waits for the next attempt. Raises the error after `unread_secs` seconds without success."""
        if self._unread_since is None:
            self._unread_since = self._clock()
            _log.warning("%s Retrying for %g s.", error, self._patience.unread_secs)
        elif self._clock() - self._unread_since > self._patience.unread_secs:
            raise error
        self._sleep(self._patience.poll_secs)

    def _ended_training(self) -> tuple[Holder | None, bool]:
        """Returns the holder of the lease if it no longer trains, and True if it is the followed training.

        (None, True): It trains. (None, False): No training has begun. (holder, False): The lease of an
        earlier run, which has been silent since before this process began.
        """
        holder, has_polled = self._lease.read(), self._has_polled
        self._has_polled = True
        if holder is None:
            return None, False
        if self._first is None or self._first.identity != holder.identity:
            self._first = holder
            self._began = holder.identity if has_polled else None
        if holder.beat != self._first.beat:
            self._alive = holder.identity
        if self._lease.is_alive(holder):
            return None, True
        is_ours = holder.identity in (self._alive, self._began)
        return holder, is_ours or holder.beat >= self._born

    def _next(self) -> Manifest | None:
        pending = {
            m.step: m
            for m in self._watched.committed()
            if m not in self._evaluated and (m.step, m.created) not in self._unusable
        }
        deleted = sorted(set(self._pending) - set(pending))
        if deleted:
            _log.warning(
                "Deleted before they were evaluated: steps %s. Keep more checkpoints, or save less often.",
                ", ".join(map(str, deleted)),
            )
        self._pending = pending
        return pending[min(pending)] if pending else None

    def _evaluate(self, manifest: Manifest, evaluate: Callable[[Manifest], None]) -> None:
        del self._pending[manifest.step]
        try:
            with self._evaluated.beating(manifest.step):
                evaluate(manifest)
        except UnusableCheckpoint as e:
            self._unusable.add((manifest.step, manifest.created))
            _log.warning("Skipping the checkpoint of step %d: %s.", manifest.step, e)
            return
        self._unread_since = None
        self._evaluated.add(manifest)
        self.count, self.step = self.count + 1, manifest.step

    def _reason(self, holder: Holder) -> str:
        """Returns the reason for which the training ended. Raises PeerLostError if it is not complete."""
        note = "All of its checkpoints are evaluated."
        if holder.state != ENDED:
            raise PeerLostError(
                f"The training on {holder.host}, process {holder.pid}, died after step {holder.step}, its "
                f"newest checkpoint. {note}"
            )
        if holder.exit_code in (EXIT_RETRY, EXIT_PREEMPTED):
            raise PeerLostError(
                f"The training on {holder.host} is not complete: {holder.reason} at step "
                f"{holder.step}. {note}"
            )
        return holder.reason
