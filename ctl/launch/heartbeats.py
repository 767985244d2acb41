"""Signs of life of workers: a small file that each writes about once a second.

    pulse = Pulse(log_dir, timeouts)
    pulse.begin(tasks)                      # before an attempt: old files go
    environ["CTL_HEARTBEAT"] = str(pulse.path(task))
    ...
    hang = pulse.look(running)              # None, or who is hung and why

The file is one JSON object: pid, step, phase, and the Unix seconds `beat` and `progressed`, when the
step last changed. Only a change counts, by our own clock, so the clocks of two machines may differ.
A process that never writes one is only hung if it is stopped, or idle while others write theirs.
"""

import atexit
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ctl.distribute.cluster import Cluster
from ctl.io import paths
from ctl.launch.roles import log_name, name, trains

_LOOK_SECS = 0.5
_AT_WORK = (
    "compiling",
    "training",
    "evaluating",
    "saving",
    "ended",
)  # phases from the first step on
_LEAVING_SECS = 300.0  # for a process that said "ended", to end


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """When a process is taken for hung, in seconds; 0 is never.

    Attributes:
      heartbeat: without any change; hang: without a new step while training; startup: from the start
        of the attempt to the first sign of life, if others have one; with `hang` also for what comes
        before the first step.
    """

    heartbeat: float = 60.0
    hang: float = 0.0
    startup: float = 600.0


@dataclass(frozen=True)
class Hang:
    """A process that is taken for hung: why in words, and how long it had been silent."""

    task: Cluster
    why: str
    silent_secs: float


@dataclass
class _Seen:
    content: bytes = b""
    changed_secs: float = 0.0  # by our clock
    facts: Mapping = field(default_factory=dict)
    progressed: object = None
    progressed_secs: float = 0.0

    @property
    def phase(self) -> object:
        return self.facts.get("phase")

    @property
    def step(self) -> int | None:
        step = self.facts.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None


def _directory(log_dir: Path) -> Path:
    """Beside the logs; if those are in an object store, which is slow to write, on this machine."""
    if paths.has_rename(log_dir):
        return log_dir / "heartbeat"
    own = tempfile.mkdtemp(prefix="ctl-heartbeat-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


class Pulse:
    """The heartbeats of one attempt.

    Attributes:
      highest_step: that any process told, in any attempt; None without.
    """

    def __init__(
        self, log_dir: Path, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic
    ):
        self.highest_step: int | None = None
        self._dir = _directory(Path(log_dir).absolute())
        self._timeouts = timeouts
        self._clock = clock
        self._seen: dict[str, _Seen] = {}  # by the name of the log
        self._busy: dict[str, tuple[int | None, float]] = {}  # processor time, and when it grew
        self._started_secs = self._looked_secs = clock()

    def path(self, task: Cluster) -> Path:
        """The file of one process."""
        return self._dir / log_name(task).replace(".log", ".json")

    def begin(self, tasks: Iterable[Cluster]) -> None:
        """A new attempt: forgets what was seen and deletes old files; a disk that refuses is borne."""
        self._seen.clear()
        self._busy.clear()
        self._started_secs = self._looked_secs = self._clock()
        with contextlib.suppress(OSError):
            self._dir.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            self.forget(task)

    def forget(self, task: Cluster) -> None:
        """The process is started again: its file is an old one."""
        self._seen.pop(log_name(task), None)
        self._busy.pop(log_name(task), None)
        with contextlib.suppress(OSError):
            self.path(task).unlink(missing_ok=True)

    @property
    def is_due(self) -> bool:
        """True twice a second: looking at many processes takes time."""
        return self._clock() - self._looked_secs >= _LOOK_SECS

    def look(
        self, running: Iterable[Cluster], stopped: Iterable[Cluster] = (),
        far: Iterable[Cluster] = (), cpu_ticks: Callable[[], Mapping[str, int]] = dict,
    ) -> Hang | None:  # fmt: skip
        """The first process that is hung, if any; reads their files.

        Args:
          stopped: those that the kernel calls stopped; far: those whose files may be out of sight.
          cpu_ticks: -> log_name -> processor time that it has used: a sign of life until it gives its own.
        """
        now = self._looked_secs = self._clock()
        running = list(running)
        for task in running:
            self.read(task)
        stopped, far = list(stopped), list(far)
        silent = [t for t in running if log_name(t) not in self._seen]
        ticks = cpu_ticks() if silent and (self.any or stopped) else {}
        hangs = (
            self._silence(task, now, task in stopped)
            if log_name(task) in self._seen
            else self._idle(task, now, task in stopped, ticks.get(log_name(task)))
            for task in running
        )
        found = next((hang for hang in hangs if hang), None)
        return found or self._missing([t for t in running if trains(t) and t not in far], now)

    def read(self, task: Cluster) -> None:
        """Reads one file now; what cannot be read is as before."""
        try:
            content = self.path(task).read_bytes()
        except OSError:
            return
        now = self._clock()
        seen = self._seen.setdefault(log_name(task), _Seen(changed_secs=now, progressed_secs=now))
        if content == seen.content:
            return
        seen.content, seen.changed_secs = content, now
        with contextlib.suppress(ValueError, RecursionError):
            facts = json.loads(content)
            seen.facts = facts if isinstance(facts, dict) else {}
        progressed = (seen.facts.get("progressed"), seen.step, seen.phase)
        if progressed != seen.progressed:
            seen.progressed, seen.progressed_secs = progressed, now
        if seen.step is not None:
            self.highest_step = max(seen.step, self.highest_step or 0)

    def is_saving(self, tasks: Iterable[Cluster]) -> bool:
        """True while one of them is in the middle of a save and alive; reads their files."""
        for task in tasks:
            self.read(task)
            seen = self._seen.get(log_name(task))
            if seen and seen.phase == "saving" and self._clock() - seen.changed_secs < 5.0:
                return True
        return False

    def has_trained(self, task: Cluster) -> bool:
        """Whether the process had begun to train in this attempt, as it told."""
        seen = self._seen.get(log_name(task))
        return seen is not None and seen.phase in _AT_WORK

    def step(self, task: Cluster) -> int | None:
        """The step that a process told last."""
        seen = self._seen.get(log_name(task))
        return seen.step if seen else None

    @property
    def any(self) -> bool:
        """True once a process of this attempt has given a sign of life."""
        return bool(self._seen)

    def _silence(self, task: Cluster, now: float, is_stopped: bool) -> Hang | None:
        seen, limits = self._seen[log_name(task)], self._timeouts
        silent = now - seen.changed_secs
        last = "" if seen.step is None else f" (last at step {seen.step})"
        if limits.heartbeat and silent >= self._patience(seen, now, is_stopped):
            return Hang(task, f"gave no sign of life for {silent:.0f} s{last}", silent)
        still = now - seen.progressed_secs
        if limits.hang and seen.phase == "training" and still >= limits.hang:
            return Hang(task, f"made no step for {still:.0f} s{last}", still)
        begins = trains(task) and seen.phase in ("starting", "compiling")
        if limits.hang and limits.startup and begins and still >= max(limits.hang, limits.startup):
            return Hang(task, f"was {seen.phase} for {still:.0f} s{last}", still)
        return None

    def _idle(self, task: Cluster, now: float, is_stopped: bool, ticks: int | None) -> Hang | None:
        """A process before its first sign of life: stopped, or idle while others have given theirs."""
        limit = self._timeouts.heartbeat
        looks = is_stopped or (self.any and trains(task))  # else it may be no program of ours
        ticks = ticks if limit and looks else None
        before, since = self._busy.get(log_name(task), (-1, now))
        if ticks != before:
            self._busy[log_name(task)] = ticks, now
            return None
        if ticks is None or now - since < limit:
            return None
        what = "was stopped" if is_stopped else "did nothing"
        why = f"{what} for {now - since:.0f} s before its first sign of life"
        return Hang(task, why, now - since)

    def _patience(self, seen: _Seen, now: float, is_stopped: bool) -> float:
        """Seconds of silence. TensorFlow may stop every thread of Python while it connects to peers."""
        limits = self._timeouts
        starting = now - self._started_secs < limits.startup or not limits.startup
        if seen.phase == "connecting" and starting and not is_stopped:
            return float("inf")
        return max(limits.heartbeat, _LEAVING_SECS if seen.phase == "ended" else 0.0)

    def _missing(self, running: list[Cluster], now: float) -> Hang | None:
        limit, waited = self._timeouts.startup, now - self._started_secs
        absent = [t for t in running if log_name(t) not in self._seen]
        if not (limit and self.any and absent and waited >= limit):
            return None
        others = ", ".join(map(name, absent[1:]))
        why = f"gave no sign of life within {waited:.0f} s of the start"
        return Hang(absent[0], f"{why}, nor did {others}" if others else why, waited)
