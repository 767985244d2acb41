"""A sign of life, and of progress, for whoever started this process; and a look after hanging steps.

    heartbeat.here.start()                        # writes the file that CTL_HEARTBEAT names, if any
    with heartbeat.here.watched(timeout_secs=600.0):
        heartbeat.here.reached(step)              # after each loop: two assignments
        with heartbeat.here.doing("saving"): ...

A thread does the rest, once a second. The file is one JSON object: pid, step, phase, beat and
progressed (Unix seconds). Pure Python; a disk that refuses is no reason to stop.
"""

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator

from ctl.errors import EXIT_RETRY
from ctl.io import paths
from ctl.supervision.beat_file import Beats

HEARTBEAT_VARIABLE = "CTL_HEARTBEAT"
STARTING, TRAINING, EVALUATING, SAVING, ENDED = "starting", "training", "evaluating", "saving", "ended"
COMPILING = "compiling"  # the first steps, with what TensorFlow does before them
_LEAST_SECS = {  # --step_timeout_secs is for steps; these take longer
    EVALUATING: 600.0,
    SAVING: 600.0,
    COMPILING: 1800.0,
    STARTING: 1800.0,
}
CONNECTING = "connecting"  # TensorFlow waits for peers and may hold the interpreter's lock


class Heartbeat:
    """What this process is doing; one per process, `here`, unless it is for a test.

    Attributes:
      step: completed steps, as far as known; phase: one of the words above.

    >>> heart = Heartbeat("/tmp/job_0.json")
    >>> heart.start()
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        beat_secs: float = 1.0,
        end: Callable[[int], None] = os._exit,
    ):
        """Keeps. Without a path it is that of CTL_HEARTBEAT, read at `start`; `end` ends the process."""
        self.step = 0
        self.phase = STARTING
        self._path = path
        self._beat_secs = beat_secs
        self._end = end
        self._progressed = time.time()
        self._limit_secs = 0.0
        self._look: Callable[[], int] | None = None
        self._seen = -1  # what `look` said last
        self._beats: Beats | None = None

    def start(self) -> None:
        """Begins to beat, if somebody wants to know; a second call does nothing."""
        self._path = self._path or os.environ.get(HEARTBEAT_VARIABLE)
        if (self._path is not None or self._limit_secs) and self._beats is None:
            self._write()
            self._beats = Beats(self._beat, secs=self._beat_secs, name="ctl-heartbeat")
            self._beats.start()

    def reached(self, step: int) -> None:
        """`step` steps are complete."""
        self.step = step
        self._progressed = time.time()

    def progressed(self) -> None:
        """Something was completed that is no step, such as a part of an evaluation."""
        self._progressed = time.time()

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """The phase within the block; its beginning and its end are progress."""
        before, self.phase, self._progressed = self.phase, phase, time.time()
        try:
            yield
        finally:
            self.phase, self._progressed = before, time.time()

    @contextlib.contextmanager
    def limited(self, timeout_secs: float, phase: str = STARTING) -> Iterator[None]:
        """The phase within the block, which comes before the first step; it has a limit of its own.

        Args:
          timeout_secs: 0 for no limit; else the block may take as long as its phase may.
        """
        before, self._limit_secs = self._limit_secs, timeout_secs
        self.start()
        try:
            with self.doing(phase):
                yield
        finally:
            self._limit_secs = before

    @contextlib.contextmanager
    def watched(self, timeout_secs: float, look: Callable[[], int] | None = None) -> Iterator[None]:
        """Within the block, so long without progress dumps all stacks and ends with exit code 134.

        Args:
          timeout_secs: 0 for no limit.
          look: -> completed steps within a long graph call; asked only when the time is over.
        """
        self._limit_secs, self._look, self._seen = timeout_secs, look, -1
        self.start()
        try:
            with self.doing(TRAINING):
                self._write()  # whoever looks after this process knows at once
                yield
        finally:
            self._limit_secs, self._look = 0.0, None
            self.phase = ENDED
            self._write()

    def _beat(self) -> None:
        self._write()
        limit_secs = self._limit_secs and max(self._limit_secs, _LEAST_SECS.get(self.phase, 0.0))
        if limit_secs and time.time() - self._progressed > limit_secs and self._hangs():
            self._give_up(limit_secs)

    def _hangs(self) -> bool:
        look = self._look
        if look is None:
            return True
        step, before = look(), self._seen
        self._seen = step
        if step <= max(before, self.step):
            return True
        self._progressed = time.time()
        return False

    def _give_up(self, limit_secs: float) -> None:
        file = sys.__stderr__
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                print(
                    f"ctl: nothing has moved for {limit_secs:g} s (--step_timeout_secs), after step "
                    f"{max(self.step, self._seen)} while {self.phase}. The stacks of all threads:",
                    file=file,
                    flush=True,
                )
                faulthandler.dump_traceback(file=file, all_threads=True)
                print(f"ctl: ended with {EXIT_RETRY}, worth another attempt.", file=file, flush=True)
        self._end(EXIT_RETRY)

    def _write(self) -> None:
        if self._path is None:
            return
        content = {
            "pid": os.getpid(),
            "step": self.step,
            "phase": self.phase,
            "beat": time.time(),
            "progressed": self._progressed,
        }
        with contextlib.suppress(OSError):
            paths.write_whole(paths.path(self._path), json.dumps(content))


here = Heartbeat()
