"""Goes through the checkpoints of a training that runs elsewhere, each once, until it has ended.

Which checkpoint comes next, when to wait and when to leave; what to do with one is the caller's.
The clock is passed in.
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
from ctl.errors import EXIT_PREEMPTED, EXIT_RETRY, PeerLostError, ReadError, UsageError
from ctl.io import paths
from ctl.supervision.beat_file import BeatReader, Beats
from ctl.supervision.lease import ENDED, Holder, Lease
from ctl.training import validation
from ctl.training.trainer_protocol import TrainerProtocol

POLL_SECS = 1.0
BEGIN_SECS = 600.0
BEAT_SECS = 30.0
UNREAD_SECS = 60.0
_CLOSING_SECS = 3.0  # in which an evaluator closes its writers
_log = logging.getLogger("ctl")


def checkpoints(trainer: TrainerProtocol) -> WatchedCheckpoints:
    """The manager of an evaluator; raises UsageError for a trainer that cannot evaluate."""
    validation.check_methods(trainer, "evaluate")
    if trainer.model_dir is None:
        raise UsageError(
            "an evaluator task of TF_CONFIG evaluates the checkpoints of a training, and no model_dir "
            "says where they are. Give the trainer the model_dir of the workers (--model_dir)."
        )
    given = None if trainer._checkpoints is None else trainer._checkpoints.directory
    return WatchedCheckpoints(given or f"{trainer.model_dir}/checkpoints")


class Evaluated:
    """Which checkpoints are done, in a small JSON file: step -> when that checkpoint was made.

    A checkpoint saved again at the same step is another one. A file that cannot be read counts as
    none; one that cannot be written is one warning.

    Attributes:
      content: the file as it was found; changes with every checkpoint that is done, and every beat.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = paths.path(path)
        self._done: dict[str, float] = {}
        self._warned = False
        self._writing = threading.Lock()
        self.content = ""
        try:
            self.content = self._path.read_bytes().decode()
            content = json.loads(self.content)["evaluated"]
            self._done = {str(step): float(made) for step, made in content.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            _log.warning("%s cannot be read (%r); every checkpoint counts as new.", self._path, e)

    def __contains__(self, manifest: Manifest) -> bool:
        return self._done.get(str(manifest.step)) == manifest.created

    def add(self, manifest: Manifest) -> None:
        """Notes that a checkpoint is done, also for the next process."""
        self._done[str(manifest.step)] = manifest.created
        self._write({})

    @contextlib.contextmanager
    def beating(self, step: int, beat_secs: float = BEAT_SECS) -> Iterator[None]:
        """While a checkpoint is evaluated, the file says so every few seconds: somebody may wait."""
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

    def _write(self, more: dict[str, Any]) -> None:
        text = json.dumps({"evaluated": self._done, **more}) + "\n"
        try:
            with self._writing:
                paths.write_atomically(self._path, text)
        except OSError as e:
            if not self._warned:
                self._warned = True
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
    """Waits until the newest checkpoint is evaluated by another process, or nothing moves any more.

    For platforms that end all processes with the chief. `path` is the evaluator's list; when nothing
    is done and nothing beats for `patience_secs`, a warning is all. Returns whether the newest is done.
    """
    try:
        newest = max(watched.committed(), key=lambda m: m.step, default=None)
    except ReadError as e:
        _log.warning("%s Leaving without waiting for the evaluator.", e)
        return False
    if newest is None or newest in Evaluated(path):
        return newest is not None
    _log.info("Waiting for the evaluator: this platform ends all processes with the chief.")
    reader = BeatReader(clock)
    while reader.silent_secs < patience_secs:
        done = Evaluated(path)
        if newest in done:
            sleep(_CLOSING_SECS)
            return True
        reader.read(done.content)
        sleep(POLL_SECS)
    _log.warning(
        "The evaluator has not evaluated step %d, and was silent for %g s; leaving without it.",
        newest.step,
        patience_secs,
    )
    return False


@dataclass(frozen=True)
class Patience:
    """How long an evaluator waits, in seconds.

    Attributes:
      poll_secs: between two looks; begin_secs: for a training to begin; unread_secs: for a file or a
        directory that cannot be read to be readable again.
    """

    poll_secs: float = POLL_SECS
    begin_secs: float = BEGIN_SECS
    unread_secs: float = UNREAD_SECS


class Following:
    """One evaluator's way through a training.

    Attributes:
      count: checkpoints evaluated by this process; step: of the newest of them, or None.
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
        """Keeps; `born` is the Unix time at which this process began."""
        self.count = 0
        self.step: int | None = None
        self._watched = watched
        self._lease = lease
        self._evaluated = evaluated
        self._born = born
        self._patience = patience
        self._clock = clock
        self._sleep = sleep
        self._first: Holder | None = None  # as it was first read
        self._has_polled = False
        self._began: tuple | None = None  # the training that appeared after the first poll
        self._alive: tuple | None = None  # the training whose beat was seen to move
        self._passed_over: set[tuple[int, float]] = set()
        self._pending: dict[int, Manifest] = {}
        self._unread_since: float | None = None  # by the clock; None: what came last could be read

    def run(self, evaluate: Callable[[Manifest], None], stopped: Callable[[], bool]) -> str:
        """Calls `evaluate` for each checkpoint, oldest first; returns why the training ended.

        Returns "stopped" as soon as `stopped()` is true. Raises PeerLostError, when nothing is left
        to evaluate, if the training died, was preempted, or never began; ReadError if what it saved
        cannot be read.
        """
        waiting_since = self._clock()
        while not stopped():
            gone = self._gone()  # before looking for checkpoints: the last is saved before the end
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
                    f"No training began in {self._watched.directory.parent} within "
                    f"{self._patience.begin_secs:g} s; expected a chief that trains there. Start it, "
                    "then the evaluator again."
                )
            self._sleep(self._patience.poll_secs)
        return "stopped"

    def _wait_until_readable(self, error: ReadError) -> None:
        """Waits for the next attempt; raises the error once nothing could be read for `unread_secs`."""
        if self._unread_since is None:
            self._unread_since = self._clock()
            _log.warning("%s Trying again for %g s.", error, self._patience.unread_secs)
        elif self._clock() - self._unread_since > self._patience.unread_secs:
            raise error
        self._sleep(self._patience.poll_secs)

    def _gone(self) -> tuple[Holder | None, bool]:
        """The holder if it no longer trains, else None; and whether that is our training.

        (None, True): it trains. (None, False): nobody has. (holder, False): left by an earlier run,
        which was silent before this process began and ever since.
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
        there = {
            m.step: m
            for m in self._watched.committed()
            if m not in self._evaluated and (m.step, m.created) not in self._passed_over
        }
        deleted = sorted(set(self._pending) - set(there))
        if deleted:
            _log.warning(
                "Deleted before they were evaluated: steps %s. Keep more checkpoints, or save less often.",
                ", ".join(map(str, deleted)),
            )
        self._pending = there
        return there[min(there)] if there else None

    def _evaluate(self, manifest: Manifest, evaluate: Callable[[Manifest], None]) -> None:
        del self._pending[manifest.step]
        try:
            with self._evaluated.beating(manifest.step):
                evaluate(manifest)
        except UnusableCheckpoint as e:
            self._passed_over.add((manifest.step, manifest.created))
            _log.warning("Passing over the checkpoint of step %d: %s.", manifest.step, e)
            return
        self._unread_since = None
        self._evaluated.add(manifest)
        self.count, self.step = self.count + 1, manifest.step

    def _reason(self, holder: Holder) -> str:
        """Why our training ended, with every checkpoint done; raises if it is not complete."""
        left = "Every checkpoint that it left is evaluated."
        if holder.state != ENDED:
            raise PeerLostError(
                f"The training on {holder.host}, process {holder.pid}, died without a word after "
                f"step {holder.step}, its newest checkpoint. {left}"
            )
        if holder.exit_code in (EXIT_RETRY, EXIT_PREEMPTED):
            raise PeerLostError(
                f"The training on {holder.host} is not complete: {holder.reason} at step "
                f"{holder.step}. {left}"
            )
        return holder.reason
