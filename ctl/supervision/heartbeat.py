"""Heartbeats of this process for its launcher, and detection of steps that hang.

    heartbeat.current.start()                     # writes the file that CTL_HEARTBEAT names, if any
    with heartbeat.current.supervise_training(timeout_secs=600.0):
        heartbeat.current.record_step(step)       # after each loop: two assignments
        with heartbeat.current.enter_phase(heartbeat.SAVING): ...

A thread writes the file once a second. It is one JSON object with the keys pid, step, phase, beat and
progressed. The last two are times (seconds) of a clock of this process. A launcher on the same machine
provides a file in memory; elsewhere a file is overwritten in place. Write errors are ignored. Pure Python.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator

from ctl.errors import EXIT_RETRY
from ctl.supervision.beat_file import BeatFile, Beats, PollClock
from ctl.supervision.stacks import format_stacks

HEARTBEAT_VARIABLE = "CTL_HEARTBEAT"
STARTING, TRAINING, EVALUATING, SAVING, ENDED = "starting", "training", "evaluating", "saving", "ended"
COMPILING = "compiling"  # the first steps, with the work of TensorFlow before them
_MIN_LIMIT_SECS = {  # --step_timeout_secs is for steps; these take longer
    EVALUATING: 600.0,
    SAVING: 600.0,
    COMPILING: 1800.0,
    STARTING: 1800.0,
}
_READ_STEP_SECS = 5.0  # without progress, after which steps inside a graph call are read
_MISSED_BEATS = 5  # a longer pause of this process (SIGSTOP, suspend) does not count towards a limit
CONNECTING = "connecting"  # TensorFlow waits for peers and may hold the interpreter's lock


class Heartbeat:
    """The progress of this process. A process uses one instance, `current`.

    >>> heartbeat = Heartbeat("/tmp/job_0.json")
    >>> heartbeat.start()

    Args:
      path: Path of the file. None: the value of CTL_HEARTBEAT at `start`.
      beat_secs: Interval of the writes (seconds).
      end: Ends the process with an exit code.

    Attributes:
      step: Number of completed steps at the newest `record_step`.
      phase: One of the phases of this module.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        beat_secs: float = 1.0,
        end: Callable[[int], None] = os._exit,
    ):
        self.step = 0
        self.phase = STARTING
        self._path = path
        self._file: BeatFile | None = None
        self._beat_secs = beat_secs
        self._end = end
        self._clock = PollClock(_MISSED_BEATS * beat_secs)
        self._progressed = self._clock()
        self._limit_secs = 0.0
        self._read_step: Callable[[], int] | None = None
        self._newest_read_step = -1  # newest result of `read_step`
        self._step_reader: threading.Thread | None = None
        self._beats: Beats | None = None

    def start(self) -> None:
        """Starts the thread if there is a file to write or a timeout. A second call is a no-op."""
        self._path = self._path or os.environ.get(HEARTBEAT_VARIABLE)
        if (self._path is not None or self._limit_secs) and self._beats is None:
            self._write()
            self._beats = Beats(self._beat, secs=self._beat_secs, name="ctl-heartbeat")
            self._beats.start()

    def record_step(self, step: int) -> None:
        """Records that `step` steps are complete, which is progress."""
        self.step = step
        self._progressed = self._clock()

    def record_progress(self) -> None:
        """Records progress other than a step, such as a part of an evaluation."""
        self._progressed = self._clock()

    @contextlib.contextmanager
    def enter_phase(self, phase: str) -> Iterator[None]:
        """Sets the phase within the block. Its start and its end are progress."""
        previous, self.phase, self._progressed = self.phase, phase, self._clock()
        try:
            yield
        finally:
            self.phase, self._progressed = previous, self._clock()

    @contextlib.contextmanager
    def limit_phase(self, timeout_secs: float, phase: str = STARTING) -> Iterator[None]:
        """Sets a phase before the first step within the block, and limits its time.

        Args:
          timeout_secs: Limit (seconds), at least the minimum of the phase. 0 disables it.
          phase: The phase.
        """
        previous, self._limit_secs = self._limit_secs, timeout_secs
        self.start()
        try:
            with self.enter_phase(phase):
                yield
        finally:
            self._limit_secs = previous

    @contextlib.contextmanager
    def supervise_training(
        self, timeout_secs: float, read_step: Callable[[], int] | None = None
    ) -> Iterator[None]:
        """Prints all stacks and ends the process with exit code 134 if the block makes no progress.

        Args:
          timeout_secs: Maximum time without progress (seconds), at least the minimum of the phase. 0
            disables the limit.
          read_step: Returns the number of completed steps, also within a long graph call. It is called in
            another thread after 5 s without progress.
        """
        self._limit_secs, self._read_step, self._newest_read_step = timeout_secs, read_step, -1
        self.start()
        try:
            with self.enter_phase(TRAINING):
                self._write()  # the launcher reads the new phase without delay
                yield
        finally:
            self._limit_secs, self._read_step = 0.0, None
            self.phase = ENDED
            self._write()

    def _beat(self) -> None:
        self._write()
        self._start_step_reader()
        limit_secs = self._limit_secs and max(self._limit_secs, _MIN_LIMIT_SECS.get(self.phase, 0.0))
        if limit_secs and self._clock() - self._progressed > limit_secs and self._is_hanging():
            self._end_process(limit_secs)

    def _start_step_reader(self) -> None:
        """Counts steps inside a long graph call as progress.

        Runs `read_step` in another thread, because reading a variable of a busy device may block.
        """
        read_step, reader = self._read_step, self._step_reader
        is_reading = reader is not None and reader.is_alive()
        if read_step is None or is_reading or self._clock() - self._progressed < _READ_STEP_SECS:
            return

        def read() -> None:
            with contextlib.suppress(Exception):  # training may have ended
                step = read_step()
                if step > max(self._newest_read_step, self.step):
                    self._newest_read_step, self._progressed = step, self._clock()

        self._step_reader = threading.Thread(target=read, name="ctl-step-reader", daemon=True)
        self._step_reader.start()

    def _is_hanging(self) -> bool:
        read_step = self._read_step
        if read_step is None:
            return True
        step, previous = read_step(), self._newest_read_step
        self._newest_read_step = step
        if step <= max(previous, self.step):
            return True
        self._progressed = self._clock()
        return False

    def _end_process(self, limit_secs: float) -> None:
        file = sys.__stderr__
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                print(
                    f"ctl: no progress for {limit_secs:g} s (--step_timeout_secs) after step "
                    f"{max(self.step, self._newest_read_step)} while {self.phase}. Stacks of all threads:",
                    file=file,
                    flush=True,
                )
                print(format_stacks(), file=file)
                print(f"ctl: exit code {EXIT_RETRY}; the job can be retried.", file=file, flush=True)
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


current = Heartbeat()
