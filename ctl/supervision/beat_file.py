"""A file that its writer renews, so that who reads it knows whether the writer lives.

    beats = Beats(lambda: paths.write_whole(path, text()), secs=1.0, name="ctl-heartbeat")
    beats.start()                              # from a thread of its own, until `stop`
    reader = BeatReader()
    reader.read(path.read_bytes())
    reader.silent_secs                         # by the reader's own clock

Three are written: by every process of a job for its launcher (heartbeat.py), by the chief for other jobs
(lease.py), and by an evaluator for the chief (training/checkpoint_follower.py).
"""

import threading
import time
from collections.abc import Callable


class Beats:
    """Calls `beat` every `secs` in a daemon thread, until `stop`, or until it returns False."""

    def __init__(self, beat: Callable[[], bool | None], *, secs: float, name: str):
        self._beat, self._secs = beat, secs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """The first beat comes `secs` from now."""
        self._thread.start()

    def stop(self, *, wait: bool = False) -> None:
        """No beat begins any more; `wait` for one that is under way."""
        self._stopped.set()
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._secs):
            if self._beat() is False:
                return


class BeatReader:
    """How long a file has been without change, by the reader's clock: those of two machines differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._content: object = None
        self._changed_secs = clock()

    def read(self, content: object) -> bool:
        """Takes what the file says now; whether that is new."""
        is_new = content != self._content
        if is_new:
            self._content, self._changed_secs = content, self._clock()
        return is_new

    @property
    def silent_secs(self) -> float:
        """Seconds since the newest content was first read."""
        return self._clock() - self._changed_secs
