"""Who trains in a model_dir, and whether it still does: the file LOCK that the chief writes.

    with Lease("/tmp/m/LOCK").held(step=lambda: 0):       # the chief, while it trains
        ...                                               # refused while another one lives
    lease = Lease("/tmp/m/LOCK")                          # anybody else
    (holder := lease.read()) and lease.is_alive(holder)

A lease is renewed, not locked: it works on network file systems, and a dead holder needs no cleaning up.
A frozen holder that was replaced finds out before it writes (`check`), and ends.
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
from ctl.supervision.beat_file import BeatReader, Beats, PollClock
from ctl.supervision.process_identity import namespace, process_mark

TRAINING, ENDED = "training", "ended"
LOCK_NAME = "LOCK"
STALE_SECS = 60.0
_BEAT_SECS = 5.0
_LAST_WRITE_SECS = 10.0  # for a disk that hangs, at the end of training
_CLAIM_SECS = 10.0  # a claim that another process has left half-way is removed then
_SETTLE_SECS = 1.0  # in object stores, where nothing can be created exclusively
DEAD_HOLDERS = "CTL_DEAD_HOLDERS"  # of whom the launcher found out that they are dead
_log = logging.getLogger("ctl")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What LOCK says; the file is this as JSON.

    Attributes:
      host, pid: the process that trains; process: what tells it from a later one with this number.
      started, beat: Unix time, seconds, by the clock of `host`: of the beginning, and of the newest
        sign of life.
      state: "training" or "ended"; reason: why it ended, "" before.
      exit_code: what the end means to a platform, as in `ctl.errors`; 0 while training.
      step: of the newest checkpoint that this training restored or saved.
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

    @property
    def identity(self) -> tuple:
        """Equal for two readings of one training."""
        return self.host, self.pid, self.process, self.started

    @property
    def fingerprint(self) -> str:
        """Equal for two readings without a beat in between."""
        return hashlib.sha256(repr((*self.identity, self.beat)).encode()).hexdigest()[:16]


_dead: set[str] = set()  # fingerprints of holders that were waited for in vain, by this process


class Lease:
    """One model_dir's LOCK, to hold or to look at.

    >>> Lease("/tmp/m/LOCK").read()          # None where nobody has trained
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        beat_secs: float = _BEAT_SECS,
        stale_secs: float = STALE_SECS,
        clock: Callable[[], float] | None = None,
    ):
        """Keeps; touches nothing.

        Args:
          path: of the file, by custom `model_dir/LOCK`; a URL too.
          beat_secs: between two signs of life.
          stale_secs: without one for so long, the holder is taken for dead.
          clock: Seconds, for the silence of other processes. Defaults to a `PollClock`.
        """
        self._path = paths.path(path)
        self._beat_secs = beat_secs
        self._stale_secs = stale_secs
        self._clock = clock or PollClock()
        self._reader = BeatReader(self._clock)
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._warned = False
        self._mine: Holder | None = None
        self._confirmed_secs = 0.0  # time.monotonic

    def read(self) -> Holder | None:
        """What the file says now; None if there is none, or none that can be read."""
        try:
            return self._read()
        except OSError:
            return None

    def _read(self) -> Holder | None:
        """The same; raises OSError where there is a file that the disk does not give."""
        try:
            content = json.loads(paths.read_file(self._path))
            known = {f.name for f in fields(Holder)}
            holder = Holder(**{k: v for k, v in content.items() if k in known})
            numbers = (holder.started, holder.beat, holder.pid, holder.step)
            good = all(isinstance(n, (int, float)) and abs(n) < 2**53 for n in numbers)
            return holder if good and isinstance(holder.process, str) else None
        except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    def is_alive(self, holder: Holder) -> bool:
        """False if the training has ended or its process has died.

        On the machine of the process this is known without delay. On another machine the process is dead
        once this object has seen no change of its beat for `stale_secs`. Clocks are never compared.
        """
        if holder.state != TRAINING or holder.fingerprint in _known_dead():
            return False
        if _is_here(holder) and process_mark(holder.pid) != holder.process:
            return False
        self._reader.read((holder.identity, holder.beat))
        return self._reader.silent_secs <= self._stale_secs

    def claim(self) -> None:
        """Raises UsageError if another training lives here; returns once it is known that none does.

        At once where the other process can be looked for. One on another machine is given the time for
        its next beat, and is taken for dead after `stale_secs` without one.
        """
        if isinstance(self._path, Path) and self._path.exists() and not self._path.is_file():
            raise UsageError(
                f"{self._path} is not a file; expected the lock file of a training. Remove it."
            )
        first = self.read()
        if first is None or _is_me(first) or not self.is_alive(first):
            return
        told, until_secs = False, self._clock() + self._stale_secs
        while not _is_here(first):
            holder = self.read()
            if holder is None or holder.state != TRAINING:
                return
            if holder.beat != first.beat or holder.identity != first.identity:
                break
            if self._clock() >= until_secs or not self.is_alive(holder):
                _dead.add(holder.fingerprint)  # no process has to wait for it again
                return
            if not told:
                told = True
                _log.warning(
                    "%s names process %d on %s; waiting up to %.0f s for a sign that it lives.",
                    self._path,
                    first.pid,
                    first.host,
                    self._stale_secs,
                )
            time.sleep(min(1.0, self._beat_secs))
        raise self._in_use(first)

    def _in_use(self, holder: Holder) -> UsageError:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.started))
        return UsageError(
            f"{self._path.parent} is in use: process {holder.pid} on {holder.host} has trained there since "
            f"{since}. Wait for its end, end it, or give another --model_dir."
        )

    def _take(self, mine: Holder) -> None:
        """Writes `mine`; of two that begin at the same time one is refused."""
        if not paths.has_rename(self._path):
            self._write(mine)
            time.sleep(min(_SETTLE_SECS, self._beat_secs))
            there = self.read()
            if there is not None and there.identity != mine.identity:
                raise self._in_use(there)
            return
        with _exclusive(Path(self._path)):
            there = self.read()
            if there is not None and not _is_me(there) and self.is_alive(there):
                raise self._in_use(there)
            self._write(mine)

    def check(self) -> None:
        """Raises LeaseLostError if another process holds the lease that this one was given.

        Reads the file only if no beat has confirmed the lease lately: cheap enough for every loop.
        """
        if time.monotonic() - self._confirmed_secs >= 2 * self._beat_secs:
            with contextlib.suppress(OSError):  # the next loop asks again
                self.check_now()

    def check_now(self) -> None:
        """The same, by reading the file: before what must not be written twice.

        Raises OSError if the file is there and cannot be read: then nobody knows.
        """
        mine = self._mine
        there = self._read() if mine is not None else None
        if mine is None or there is None:
            return
        if there.identity == mine.identity:
            self._confirmed_secs = time.monotonic()
            return
        raise LeaseLostError(
            f"{self._path.parent} was taken over by process {there.pid} on {there.host}: this process was "
            "frozen, or could not reach its disk, for so long that it was taken for dead. It writes "
            "nothing more and ends; the other one trains on."
        )

    @contextlib.contextmanager
    def held(self, step: Callable[[], int]) -> Iterator["Lease"]:
        """Holds the lease: beats from a thread of its own, and says at the end why it ended.

        Args:
          step: -> the step of the newest checkpoint; called from that thread, so it must be cheap.

        Yields itself, for `check`. A disk that refuses is one warning. Raises UsageError while another
        training holds it.
        """
        self.claim()
        now = time.time()
        mine = Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            process=process_mark(os.getpid()),
            started=now,
            beat=now,
            state=TRAINING,
            step=step(),
        )
        self._ended.clear()
        self._mine, self._confirmed_secs = mine, time.monotonic()
        self._take(mine)

        def left() -> None:  # a signal ended the process before the first step
            self._ended.set()
            self._write(mine, state=ENDED, reason="stopped by a signal", exit_code=errors.EXIT_PREEMPTED)

        atexit.register(left)
        beats = Beats(lambda: self._beat(mine, step), secs=self._beat_secs, name="ctl-lease")
        beats.start()
        reason, code = "done", EXIT_DONE
        try:
            yield self
        except BaseException as e:
            reason, code = _reason_of(e)
            raise
        finally:
            atexit.unregister(left)
            beats.stop()
            self._ended.set()
            self._write(mine, state=ENDED, reason=reason, exit_code=code, step=step())

    def _beat(self, mine: Holder, step: Callable[[], int]) -> bool:
        """Whether to beat on."""
        try:
            self.check_now()
            self._write(mine, step=step())
        except LeaseLostError:
            self._confirmed_secs = float("-inf")  # the main thread finds out, and ends
            return False
        except OSError as e:
            self._warn(e)
        return True

    def _write(self, mine: Holder, **changes: object) -> None:
        if not self._writing.acquire(timeout=_LAST_WRITE_SECS):
            return  # a write that hangs: then this one would, too
        try:
            if self._ended.is_set() and "state" not in changes:
                return  # a beat that comes too late must not undo the end
            there = self._read() if changes else None
            if there is not None and there.identity != mine.identity:
                return  # another one has taken over
            content = {**asdict(mine), "beat": time.time(), **changes}
            paths.write_whole(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as e:
            self._warn(e)
        finally:
            self._writing.release()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s cannot be renewed (%s); training goes on, but an evaluator may take it for dead.",
                self._path,
                error.strerror or error,
            )


def holding(
    model_dir: str | None, step: Callable[[], int]
) -> contextlib.AbstractContextManager[Lease | None]:
    """Holds the lease of a model_dir; does nothing without one."""
    return Lease(paths.path(model_dir) / LOCK_NAME).held(step) if model_dir else contextlib.nullcontext()


def claim_lease(model_dir: str | None) -> None:
    """Raises UsageError while another training lives in a model_dir; see `Lease.claim`."""
    if model_dir:
        Lease(paths.path(model_dir) / LOCK_NAME).claim()


def _known_dead() -> set[str]:
    return _dead | set(os.environ.get(DEAD_HOLDERS, "").split(","))


def found_dead() -> str:
    """What `DEAD_HOLDERS` is to say to processes that this one starts: nobody waits twice."""
    return ",".join(sorted(_dead))


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One process at a time is in here, on whatever machine; for moments.

    What a process that died here has left is removed when it has not changed for some seconds.
    """
    mark, seen, since = path.with_name(f".{path.name}-claim"), (0, 0), time.monotonic()
    while True:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            break
        except FileExistsError:
            there = _version(mark)
            if there != seen:
                seen, since = there, time.monotonic()
            elif time.monotonic() - since > _CLAIM_SECS:
                with contextlib.suppress(OSError):
                    mark.unlink()
            time.sleep(0.02)
        except OSError:  # a disk that refuses is told by the write that follows
            yield
            return
    mine = _version(mark)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _version(mark) == mine:
                mark.unlink()


def _version(path: Path) -> tuple[int, int]:
    """Another one for each file that had this name: numbers of files are used again."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_ctime_ns
    return 0, 0


def _is_here(holder: Holder) -> bool:
    """Whether the process of `holder` can be looked for on this machine."""
    here, there = namespace(), holder.process.partition("/")[0]
    return holder.host == socket.gethostname() and here != "" and here == there


def _is_me(holder: Holder) -> bool:
    """Whether this process holds it; several may have begun at the same tick of the clock."""
    return (holder.pid, holder.process) == (os.getpid(), process_mark(os.getpid()))


def _reason_of(error: BaseException) -> tuple[str, int]:
    if isinstance(error, Stopped):
        return "stopped by a signal", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", errors.EXIT_INTERRUPTED
    code = error.exit_code if isinstance(error, CtlError) else errors.EXIT_FAILED
    return f"failed: {type(error).__name__}", code
