"""Beat files: small files that a live process keeps changing, and readers that detect silence.

    beats = Beats(lambda: file.write(text()), secs=1.0, name="ctl-heartbeat")
    beats.start()                              # in a daemon thread, until `stop`
    reader = BeatReader()
    reader.read(path.read_bytes())
    reader.silent_secs                         # by the reader's own clock

Users: every process of a job for its launcher (heartbeat.py), the chief for other jobs (lease.py), and an
evaluator for the chief (evaluator/checkpoint_follower.py). Readers compare contents. They never subtract
the clock of another process from their own, because clocks differ and may be set.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

MEMORY_FILE_PREFIX = "ctl-heartbeat-"  # name of a memory file that a launcher creates for a worker
_RECORD_BYTES = 512  # every write has this length, so that it never needs a new disk block
_MAX_POLL_SECS = 2.0


class PollClock:
    """Monotonic clock (seconds) that counts at most `max_poll_secs` between two calls.

    The time during which its owner did not run (SIGSTOP, a suspended machine, a frozen container) is
    therefore not mistaken for the silence of another process.

    Args:
      max_poll_secs: Maximum time between two calls that counts (seconds).
      clock: Returns the time (seconds).
    """

    def __init__(self, max_poll_secs: float = _MAX_POLL_SECS, clock: Callable[[], float] = time.monotonic):
        self._max_poll_secs = max_poll_secs
        self._clock = clock
        self._lock = threading.Lock()
        self._read_secs = clock()
        self._elapsed_secs = 0.0

    def __call__(self) -> float:
        """Returns the counted seconds. A call counts as a poll."""
        with self._lock:
            read_secs = self._clock()
            self._elapsed_secs += min(read_secs - self._read_secs, self._max_poll_secs)
            self._read_secs = read_secs
            return self._elapsed_secs


class BeatFile:
    """A writer of one beat file.

    The file is opened once and overwritten in place, so a full disk does not stop the beats. A file that
    was deleted is created again.

    Args:
      path: Path of the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._is_in_memory = self._path.is_relative_to("/proc")
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Replaces the content by `text` and blanks. After an OSError the next call reopens the file."""
        with self._lock:
            try:
                if self._descriptor is None:
                    self._descriptor = self._open()
                os.pwrite(self._descriptor, text.encode().ljust(_RECORD_BYTES), 0)
                if not self._is_in_memory:
                    os.fsync(self._descriptor)  # NFS shows a write to other machines only then
                    if os.fstat(self._descriptor).st_nlink == 0:
                        self._close()
            except OSError:
                self._close()
                raise

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _open(self) -> int:
        if not self._is_in_memory:
            return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        # In another PID namespace the same path may be a file of an unrelated process.
        if not os.readlink(self._path).startswith(f"/memfd:{MEMORY_FILE_PREFIX}"):
            raise FileNotFoundError(f"{self._path} is not the memory file of a launcher")
        return os.open(self._path, os.O_RDWR)


class Beats:
    """A daemon thread that calls a function periodically.

    Args:
      beat: The function. If it returns False, the thread ends.
      secs: Interval (seconds).
      name: Name of the thread.
    """

    def __init__(self, beat: Callable[[], bool | None], *, secs: float, name: str):
        self._beat, self._secs = beat, secs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. The first call is after `secs`."""
        self._thread.start()

    def stop(self, *, wait: bool = False) -> None:
        """Ends the calls. With `wait`, returns after a call that is in progress."""
        self._stopped.set()
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._secs):
            if self._beat() is False:
                return


class BeatReader:
    """A detector of silence: measures with its own clock how long a content has not changed.

    Args:
      clock: Returns the time (seconds).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._content: object = None
        self._changed_secs = clock()

    def read(self, content: object) -> bool:
        """Stores the current content. Returns True if it differs from the previous one."""
        is_new = content != self._content
        if is_new:
            self._content, self._changed_secs = content, self._clock()
        return is_new

    def restart(self) -> None:
        """Restarts the measurement of silence, for example after an error in reading the content."""
        self._changed_secs = self._clock()

    @property
    def silent_secs(self) -> float:
        """Returns the seconds since the newest content was first read."""
        return self._clock() - self._changed_secs
