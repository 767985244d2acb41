"""Who trains in a model_dir, and whether it still does: the file LOCK that the chief writes.

    with Lease("/tmp/m/LOCK").held(step=lambda: 0):       # the chief, while it trains
        ...                                               # refused while another one lives
    lease = Lease("/tmp/m/LOCK")                          # anybody else
    holder = lease.read()
    holder is not None and lease.is_alive(holder)

A lease is renewed, not locked: it works on network file systems, and a dead holder needs no cleaning
up, and takes nobody's lock. Pure Python; nothing here raises because of the disk.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ctl import files
from ctl.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, CtlError, Stopped, UsageError

TRAINING, ENDED = "training", "ended"
NAME = "LOCK"
STALE_SECS = 60.0
_BEAT_SECS = 5.0
_PROOF_BEATS = 3  # what a lease with an old beat gets at first sight: clocks of machines differ
_LAST_WRITE_SECS = 10.0  # for a disk that hangs, at the end of training
_IMPORTED = time.time()
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


class Lease:
    """One model_dir's LOCK, to hold or to look at.

    >>> Lease("/tmp/m/LOCK").read()          # None where nobody has trained
    """

    def __init__(
        self, path: str | os.PathLike[str], *, beat_secs: float = _BEAT_SECS,
        stale_secs: float = STALE_SECS, clock: Callable[[], float] = time.time,
    ):  # fmt: skip
        """Keeps; touches nothing.

        Args:
          path: of the file, by custom `model_dir/LOCK`; a URL too.
          beat_secs: between two signs of life.
          stale_secs: without one for so long, the holder is taken for dead.
          clock: Unix time, seconds.
        """
        self._path = files.path(path)
        self._beat_secs = beat_secs
        self._stale_secs = stale_secs
        self._clock = clock
        self._seen: tuple[float, float, float] | None = None  # beat, when first seen, sign of life
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._warned = False

    def read(self) -> Holder | None:
        """What the file says now; None if there is none, or none that can be read."""
        try:
            content = json.loads(self._path.read_bytes())
            known = {f.name for f in fields(Holder)}
            holder = Holder(**{k: v for k, v in content.items() if k in known})
            numbers = (holder.started, holder.beat, holder.pid, holder.step)
            good = all(isinstance(n, (int, float)) for n in numbers)
            return holder if good and isinstance(holder.process, str) else None
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def is_alive(self, holder: Holder) -> bool:
        """False if the training has ended or its process has died.

        At once where the process can be looked for: on its own machine. Elsewhere when no beat has
        come for `stale_secs`. A beat that moves is alive, whatever the clocks of two machines say.
        """
        if holder.state != TRAINING:
            return False
        if _is_here(holder) and process_mark(holder.pid) != holder.process:
            return False
        return self._clock() - self._sign_of_life(holder.beat) <= self._stale_secs

    def _sign_of_life(self, beat: float) -> float:
        """When, by our clock, the beat was last known to be alive."""
        if self._seen is None or self._seen[0] != beat:
            now = self._clock()
            proof = now - self._stale_secs + _PROOF_BEATS * self._beat_secs
            sign = max(min(beat, now), proof) if self._seen is None else now
            self._seen = (beat, now, sign)
        return self._seen[2]

    def claim(self) -> None:
        """Raises UsageError if another training lives here; returns once it is known that none does.

        At once where the other process can be looked for. One on another machine is given the time for
        its next beat, and is taken for dead after `stale_secs` without one.
        """
        first = self.read()
        if first is None or not self.is_alive(first) or first.process == process_mark(os.getpid()):
            return
        told = False
        while not _is_here(first):
            holder = self.read()
            if holder is None or not self.is_alive(holder):
                return
            if holder.beat != first.beat or holder.identity != first.identity:
                break
            if not told:
                told = True
                _log.warning(
                    "%s names process %d on %s; waiting up to %.0f s for a sign that it lives.",
                    self._path, first.pid, first.host, self._stale_secs,
                )  # fmt: skip
            time.sleep(min(1.0, self._beat_secs))
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(first.started))
        raise UsageError(
            f"{self._path.parent} is in use: process {first.pid} on {first.host} has trained there since "
            f"{since}. Wait for its end, end it, or give another --model_dir."
        )

    @contextlib.contextmanager
    def held(self, step: Callable[[], int]) -> Iterator[None]:
        """Holds the lease: beats from a thread of its own, and says at the end why it ended.

        Args:
          step: -> the step of the newest checkpoint; called from that thread, so it must be cheap.

        A disk that refuses is one warning. Raises UsageError while another training holds it.
        """
        self.claim()
        now = self._clock()
        mine = Holder(
            host=socket.gethostname(), pid=os.getpid(), process=process_mark(os.getpid()),
            started=now, beat=now, state=TRAINING, step=step(),
        )  # fmt: skip
        self._ended.clear()
        self._write(mine)
        beats = threading.Thread(
            target=self._beat, args=(mine, step), name="ctl-lease", daemon=True
        )
        beats.start()
        reason, code = "done", EXIT_DONE
        try:
            yield
        except BaseException as e:
            reason, code = _reason_of(e)
            raise
        finally:
            self._ended.set()
            self._write(mine, state=ENDED, reason=reason, exit_code=code, step=step())

    def _beat(self, mine: Holder, step: Callable[[], int]) -> None:
        while not self._ended.wait(self._beat_secs):
            self._write(mine, step=step())

    def _write(self, mine: Holder, **changes) -> None:
        if not self._writing.acquire(timeout=_LAST_WRITE_SECS):
            return  # a write that hangs: then this one would, too
        try:
            if self._ended.is_set() and "state" not in changes:
                return  # a beat that comes too late must not undo the end
            content = {**asdict(mine), "beat": self._clock(), **changes}
            files.write_whole(self._path, json.dumps(content, indent=1) + "\n")
        except OSError as e:
            self._warn(e)
        finally:
            self._writing.release()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s cannot be written (%s); training goes on, but an evaluator may take it for dead.",
                self._path, error.strerror or error,
            )  # fmt: skip


def holding(
    model_dir: str | None, step: Callable[[], int]
) -> contextlib.AbstractContextManager[None]:
    """Holds the lease of a model_dir; does nothing without one."""
    return Lease(files.path(model_dir) / NAME).held(step) if model_dir else contextlib.nullcontext()


def claim(model_dir: str | None) -> None:
    """Raises UsageError while another training lives in a model_dir; see `Lease.claim`."""
    if model_dir:
        Lease(files.path(model_dir) / NAME).claim()


def _is_here(holder: Holder) -> bool:
    """Whether the process of `holder` can be looked for on this machine."""
    here, there = _namespace(), holder.process.partition("/")[0]
    return holder.host == socket.gethostname() and here != "" and here == there


def process_mark(pid: int) -> str:
    """What tells this process from another that has or had its number: namespace/start.

    "" if it is gone or has ended, and where /proc does not tell.
    """
    ticks = _start_ticks(pid)
    return "" if ticks is None else f"{_namespace()}/{ticks}"


def process_started() -> float:
    """Unix time, seconds, at which this process began: before its imports."""
    ticks = _start_ticks(os.getpid())
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    if ticks is None or boot_clock is None:
        return _IMPORTED
    age_secs = time.clock_gettime(boot_clock) - ticks / os.sysconf("SC_CLK_TCK")
    started = time.time() - age_secs
    return started if age_secs >= 0 and started <= _IMPORTED else _IMPORTED


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        words = text.rpartition(")")[2].split()  # the name before may hold anything
        return None if words[0] in "ZX" else int(words[19])
    except (OSError, ValueError, IndexError):
        return None


def _namespace() -> str:
    """Where process numbers are comparable: two containers of one host name differ in it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _reason_of(error: BaseException) -> tuple[str, int]:
    if isinstance(error, Stopped):
        return "stopped by a signal", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", EXIT_INTERRUPTED
    code = error.exit_code if isinstance(error, CtlError) else EXIT_FAILED
    return f"failed: {type(error).__name__}", code
