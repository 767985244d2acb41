"""Heartbeats of this process for its launcher, and detection of steps that hang.

    heartbeat.here.start()                        # writes the file that CTL_HEARTBEAT names, if any
    with heartbeat.here.watched(timeout_secs=600.0):
        heartbeat.here.reached(step)              # after each loop: two assignments
        with heartbeat.here.doing("saving"): ...

A thread writes the file once a second. It is one JSON object: pid, step, phase, and the seconds `beat`
and `progressed` by a clock that only this process has. A launcher on the same machine provides a file in
memory; elsewhere a file is overwritten in place, and write errors are ignored. Pure Python.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator

from ctl.errors import EXIT_RETRY
from ctl.supervision.beat_file import BeatFile, Beats, PollClock

HEARTBEAT_VARIABLE = "CTL_HEARTBEAT"
STARTING, TRAINING, EVALUATING, SAVING, ENDED = "starting", "training", "evaluating", "saving", "ended"
COMPILING = "compiling"  # the first steps, with what TensorFlow does before them
_LEAST_SECS = {  # --step_timeout_secs is for steps; these take longer
    EVALUATING: 600.0,
    SAVING: 600.0,
    COMPILING: 1800.0,
    STARTING: 1800.0,
}
_READ_STEP_SECS = 5.0  # without progress, after which steps inside a graph call are read
_MISSED_BEATS = 5  # a longer pause of this process (SIGSTOP, suspend) does not count towards a limit
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
        self._file: BeatFile | None = None
        self._beat_secs = beat_secs
        self._end = end
        self._clock = PollClock(_MISSED_BEATS * beat_secs)
        self._progressed = self._clock()
        self._limit_secs = 0.0
        self._look: Callable[[], int] | None = None
        self._seen = -1  # the newest result of `look`
        self._step_reader: threading.Thread | None = None
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
        self._progressed = self._clock()

    def progressed(self) -> None:
        """Something was completed that is no step, such as a part of an evaluation."""
        self._progressed = self._clock()

    @contextlib.contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """The phase within the block; its beginning and its end are progress."""
        before, self.phase, self._progressed = self.phase, phase, self._clock()
        try:
            yield
        finally:
            self.phase, self._progressed = before, self._clock()

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
          look: Returns the completed steps, also of a long graph call. Called after 5 s without progress.
        """
        self._limit_secs, self._look, self._seen = timeout_secs, look, -1
        self.start()
        try:
            with self.doing(TRAINING):
                self._write()  # the launcher reads the new phase without delay
                yield
        finally:
            self._limit_secs, self._look = 0.0, None
            self.phase = ENDED
            self._write()

    def _beat(self) -> None:
        self._write()
        self._read_step()
        limit_secs = self._limit_secs and max(self._limit_secs, _LEAST_SECS.get(self.phase, 0.0))
        if limit_secs and self._clock() - self._progressed > limit_secs and self._hangs():
            self._give_up(limit_secs)

    def _read_step(self) -> None:
        """Counts steps inside a long graph call as progress.

        Runs `look` in another thread, because reading a variable of a busy device may block.
        """
        look, reader = self._look, self._step_reader
        is_reading = reader is not None and reader.is_alive()
        if look is None or is_reading or self._clock() - self._progressed < _READ_STEP_SECS:
            return

        def read() -> None:
            with contextlib.suppress(Exception):  # the training ends meanwhile
                step = look()
                if step > max(self._seen, self.step):
                    self._seen, self._progressed = step, self._clock()

        self._step_reader = threading.Thread(target=read, name="ctl-step-reader", daemon=True)
        self._step_reader.start()

    def _hangs(self) -> bool:
        look = self._look
        if look is None:
            return True
        step, before = look(), self._seen
        self._seen = step
        if step <= max(before, self.step):
            return True
        self._progressed = self._clock()
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
        self._file = self._file or BeatFile(self._path)
        content = {
            "pid": os.getpid(),
            "step": self.step,
            "phase": self.phase,
            "beat": self._clock(),
            "progressed": self._progressed,
        }
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(content))


here = Heartbeat()
