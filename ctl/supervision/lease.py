"""Leases of model directories: the file LOCK, which the chief of a training job writes.

    with Lease("/tmp/m/LOCK").held(step=lambda: 0):       # the chief; raises while another job trains there
        ...
    lease = Lease("/tmp/m/LOCK")                          # another process
    (holder := lease.read()) and lease.is_alive(holder)

A lease is renewed periodically instead of being locked. It works on network file systems, and the lease of
a dead process expires. A process that was frozen and has lost its lease detects this before it writes
(`check`), and ends.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ctl import errors
from ctl.errors import EXIT_DONE, CtlError, LeaseLostError, Stopped, UsageError
from ctl.io import paths
from ctl.io.authenticated_channel import job_secret
from ctl.setting_values import WORKER_RANGE_VARIABLE
from ctl.supervision.beat_file import BeatReader, Beats, PollClock
from ctl.supervision.claim_file import claim_file_lock
from ctl.supervision.process_identity import pid_namespace, process_mark

TRAINING, ENDED = "training", "ended"
LOCK_NAME = "LOCK"
STALE_SECS = 60.0
_BEAT_SECS = 5.0
_LAST_WRITE_SECS = 10.0  # timeout for a hanging disk at the end of training
_SETTLE_SECS = 1.0  # in object stores, which cannot create a file exclusively
DEAD_HOLDERS = "CTL_DEAD_HOLDERS"  # environment variable with the holders that have died
_log = logging.getLogger("ctl")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The content of LOCK, which is saved as JSON.

    Attributes:
      host: Name of the machine that trains.
      pid: Number of the process that trains.
      process: Identifier that differs if the number is reused; see `process_mark`.
      started: Unix time of the start (seconds) by the clock of `host`.
      beat: Unix time of the newest renewal (seconds) by the clock of `host`.
      state: "training" or "ended".
      reason: Reason of the end, or "".
      exit_code: Exit code of the process, see `ctl.errors`; 0 during training.
      step: Step of the newest checkpoint that was restored or saved.
      job: Identifier of the elastic job, or "". Its launcher determines the chief.
    """

    host: str
    pid: int
    process: str
    started: float
    beat: float
    state: str
    reason: str = ""
    exit_code: int = EXIT_DONE
    step: int = 0
    job: str = ""

    @property
    def identity(self) -> tuple:
        """Identifier of the training, which is the same in all its renewals."""
        return self.host, self.pid, self.process, self.started

    @property
    def fingerprint(self) -> str:
        """Identifier of this renewal."""
        return hashlib.sha256(repr((*self.identity, self.beat)).encode()).hexdigest()[:16]


_dead: set[str] = set()  # fingerprints of holders that did not renew while this process waited


class Lease:
    """The lease of a model directory, for its holder and for observers.

    >>> Lease("/tmp/m/LOCK").read()          # None if there was no training

    Args:
      path: Path or URL of the file, by convention `model_dir/LOCK`.
      beat_secs: Interval of the renewals (seconds).
      stale_secs: Time without a renewal after which the holder counts as dead (seconds).
      clock: Returns the time (seconds), to measure the silence of other processes. Defaults to a
        `PollClock`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        beat_secs: float = _BEAT_SECS,
        stale_secs: float = STALE_SECS,
        clock: Callable[[], float] | None = None,
    ):
        self._path = paths.path(path)
        self._beat_secs = beat_secs
        self._stale_secs = stale_secs
        self._clock = clock or PollClock()
        self._reader = BeatReader(self._clock)
        self._write_lock = threading.Lock()
        self._ended = threading.Event()
        self._has_warned = False
        self._own_holder: Holder | None = None
        self._end_reason = "done"
        self._confirmed_secs = 0.0  # time.monotonic

    def record_end(self, reason: str) -> None:
        """Sets the reason to write at an end without an error."""
        self._end_reason = reason

    def read(self) -> Holder | None:
        """Returns the content of the file, or None if it does not exist or cannot be read."""
        try:
            return self._read()
        except OSError:
            return None

    def _read(self) -> Holder | None:
        """Returns the content of the file, or None if it is missing or damaged. Raises OSError."""
        try:
            content = json.loads(paths.read_file(self._path))
            names = {f.name for f in fields(Holder)}
            holder = Holder(**{k: v for k, v in content.items() if k in names})
            numbers = (holder.started, holder.beat, holder.pid, holder.step)
            is_valid = all(isinstance(n, (int, float)) and abs(n) < 2**53 for n in numbers)
            return holder if is_valid and isinstance(holder.process, str) else None
        except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    def is_alive(self, holder: Holder) -> bool:
        """Returns False if the training has ended or its process has died.

        On the machine of the process this is detected without delay. On another machine, the process counts
        as dead after `stale_secs` without a renewal, by the clock of this object. Clocks of different
        machines are never compared. An earlier chief of the elastic job of this process counts as dead,
        because the launcher has removed it.
        """
        if holder.state != TRAINING or holder.fingerprint in _dead_fingerprints():
            return False
        if holder.job and holder.job == _elastic_job():
            return False
        if _is_on_this_machine(holder) and process_mark(holder.pid) != holder.process:
            return False
        self._reader.read((holder.identity, holder.beat))
        return self._reader.silent_secs <= self._stale_secs

    def check_is_free(self) -> None:
        """Raises UsageError if another job trains in this directory.

        Waits for the next renewal by a process on another machine, for at most `stale_secs`.
        """
        if isinstance(self._path, Path) and self._path.exists() and not self._path.is_file():
            raise UsageError(
                f"{self._path} is not a file; expected the lock file of a training. Remove it."
            )
        first = self.read()
        if first is None or _is_this_process(first) or not self.is_alive(first):
            return
        has_warned, deadline_secs = False, self._clock() + self._stale_secs
        while not _is_on_this_machine(first):
            holder = self.read()
            if holder is None or holder.state != TRAINING:
                return
            if holder.beat != first.beat or holder.identity != first.identity:
                break
            if self._clock() >= deadline_secs or not self.is_alive(holder):
                _dead.add(holder.fingerprint)  # so that no process waits for it again
                return
            if not has_warned:
                has_warned = True
                _log.warning(
                    "%s is held by process %d on %s; waiting up to %.0f s for a renewal of its lease.",
                    self._path,
                    first.pid,
                    first.host,
                    self._stale_secs,
                )
            time.sleep(min(1.0, self._beat_secs))
        raise self._in_use_error(first)

    def _in_use_error(self, holder: Holder) -> UsageError:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.started))
        return UsageError(
            f"{self._path.parent} is in use: process {holder.pid} on {holder.host} has trained there since "
            f"{since}. Wait for its end, end it, or specify another --model_dir."
        )

    def _acquire(self, own_holder: Holder) -> None:
        """Writes the file. If two processes do so at the same time, one raises UsageError."""
        if not paths.has_rename(self._path):
            self._write(own_holder)
            time.sleep(min(_SETTLE_SECS, self._beat_secs))
            holder = self.read()
            if holder is not None and holder.identity != own_holder.identity:
                raise self._in_use_error(holder)
            return
        with claim_file_lock(Path(self._path)):
            holder = self.read()
            if holder is not None and not _is_this_process(holder) and self.is_alive(holder):
                raise self._in_use_error(holder)
            self._write(own_holder)

    def check(self) -> None:
        """Raises LeaseLostError if another process has taken the lease of this process.

        Reads the file only if no recent renewal has confirmed the lease. Cheap enough for every loop.
        """
        if time.monotonic() - self._confirmed_secs >= 2 * self._beat_secs:
            with contextlib.suppress(OSError):  # the next loop checks again
                self.check_now()

    def check_now(self) -> None:
        """Reads the file and raises LeaseLostError if another process has taken the lease.

        Called before a commit. Raises OSError if the file exists and cannot be read.
        """
        own_holder = self._own_holder
        holder = self._read() if own_holder is not None else None
        if own_holder is None or holder is None:
            return
        if holder.identity == own_holder.identity:
            self._confirmed_secs = time.monotonic()
            return
        raise LeaseLostError(
            f"{self._path.parent} was taken over by process {holder.pid} on {holder.host}, because this "
            "process was frozen or could not write to its disk for too long. This process ends without "
            "writing; the other process continues to train."
        )

    @contextlib.contextmanager
    def held(self, step: Callable[[], int]) -> Iterator["Lease"]:
        """Holds the lease within the block. A thread renews it; the reason of the end is written at exit.

        Args:
          step: Returns the step of the newest checkpoint. Called from the thread.

        Yields:
          This object, for `check`.

        Raises UsageError if another job trains in this directory. An error of the disk is logged once.
        """
        self.check_is_free()
        started = time.time()
        own_holder = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            process=process_mark(os.getpid()),
            started=started,
            beat=started,
            state=TRAINING,
            step=step(),
            job=_elastic_job(),
        )
        self._ended.clear()
        self._own_holder, self._confirmed_secs = own_holder, time.monotonic()
        self._acquire(own_holder)

        def write_end() -> None:  # a signal has ended the process before the first step
            self._ended.set()
            reason, code = "stopped by a signal", errors.EXIT_PREEMPTED
            self._write(own_holder, state=ENDED, reason=reason, exit_code=code)

        atexit.register(write_end)
        beats = Beats(lambda: self._renew(own_holder, step), secs=self._beat_secs, name="ctl-lease")
        beats.start()
        code = EXIT_DONE
        try:
            yield self
        except BaseException as e:
            self._end_reason, code = _reason_of(e)
            raise
        finally:
            atexit.unregister(write_end)
            beats.stop()
            self._ended.set()
            self._write(own_holder, state=ENDED, reason=self._end_reason, exit_code=code, step=step())

    def _renew(self, own_holder: Holder, step: Callable[[], int]) -> bool:
        """Returns False if the lease is lost."""
        try:
            self.check_now()
            self._write(own_holder, step=step())
        except LeaseLostError:
            self._confirmed_secs = float("-inf")  # the next `check` of the main thread raises the error
            return False
        except OSError as e:
            self._warn_once(e)
        return True

    def _write(self, own_holder: Holder, **changes: object) -> None:
        if not self._write_lock.acquire(timeout=_LAST_WRITE_SECS):
            return  # another write hangs, so this one would also hang
        try:
            if self._ended.is_set() and "state" not in changes:
                return  # a late renewal must not overwrite the end
            holder = self._read() if changes else None
            if holder is not None and holder.identity != own_holder.identity:
                return  # another process has taken the lease
            content = {**asdict(own_holder), "beat": time.time(), **changes}
            paths.write_atomically(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as e:
            self._warn_once(e)
        finally:
            self._write_lock.release()

    def _warn_once(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s cannot be renewed (%s); training continues, but an evaluator may consider it dead.",
                self._path,
                error.strerror or error,
            )


def hold_lease(
    model_dir: str | None, step: Callable[[], int]
) -> contextlib.AbstractContextManager[Lease | None]:
    """Returns `Lease.held` of a model_dir, or a no-op context without a model_dir."""
    return Lease(paths.path(model_dir) / LOCK_NAME).held(step) if model_dir else contextlib.nullcontext()


def check_model_dir_is_free(model_dir: str | None) -> None:
    """Raises UsageError if another job trains in a model_dir; see `Lease.check_is_free`."""
    if model_dir:
        Lease(paths.path(model_dir) / LOCK_NAME).check_is_free()


def _dead_fingerprints() -> set[str]:
    return _dead | set(os.environ.get(DEAD_HOLDERS, "").split(","))


def dead_holders() -> str:
    """Returns the value of `DEAD_HOLDERS` for child processes, so that they do not wait again."""
    return ",".join(sorted(_dead))


def _elastic_job() -> str:
    """Returns an identifier of the elastic job of this process, or ""."""
    secret = job_secret() if os.environ.get(WORKER_RANGE_VARIABLE) else b""
    return hashlib.sha256(b"lease" + secret).hexdigest()[:16] if secret else ""


def _is_on_this_machine(holder: Holder) -> bool:
    """Returns True if this process can determine whether the process of `holder` is running."""
    namespace = pid_namespace()
    is_same_namespace = namespace != "" and namespace == holder.process.partition("/")[0]
    return holder.host == socket.gethostname() and is_same_namespace


def _is_this_process(holder: Holder) -> bool:
    """Compares number and mark, because several processes may have the same start time."""
    return (holder.pid, holder.process) == (os.getpid(), process_mark(os.getpid()))


def _reason_of(error: BaseException) -> tuple[str, int]:
    if isinstance(error, Stopped):
        return "stopped by a signal", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", errors.EXIT_INTERRUPTED
    code = error.exit_code if isinstance(error, CtlError) else errors.EXIT_FAILED
    return f"failed: {type(error).__name__}", code
