"""Heartbeats of the processes of a job: a small file that each writes about once a second.

    heartbeats = HeartbeatMonitor(log_dir / "heartbeat", timeouts)
    heartbeats.reset(tasks)                      # before an attempt: deletes old files
    environ |= heartbeats.environ(task)
    ...
    hang = heartbeats.find_hang(group)           # None, or which process is hung and why

The file is one JSON object: pid, step, phase, and the Unix seconds `beat` and `progressed`, when the
step last changed. Only a change counts, by our own clock, so the clocks of two machines may differ.
A process that never writes one is only hung if it is stopped, or idle while others write theirs.
"""

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ctl.distribute.topology import Topology
from ctl.io import paths
from ctl.launch.process_group import ProcessGroup
from ctl.launch.roles import log_name, task_name, trains
from ctl.supervision.beat_file import BeatReader
from ctl.supervision.heartbeat import HEARTBEAT_VARIABLE

_INTERVAL_SECS = 0.5  # between two checks: many files take time
_SILENT_SECS = 5.0  # after which a process that saves or ends counts as dead
_TRAINED_PHASES = ("compiling", "training", "evaluating", "saving", "ended")
_ENDED_SECS = 300.0  # for a process in phase "ended", to end


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """After how many seconds a process counts as hung; 0 is never.

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
    """A process that counts as hung: `why` continues a sentence that begins with its name."""

    task: Topology
    why: str
    silent_secs: float


@dataclass
class _LastBeat:
    reader: BeatReader
    fields: Mapping[str, object] = field(default_factory=dict)
    progressed: object = None
    progressed_secs: float = 0.0

    @property
    def phase(self) -> object:
        return self.fields.get("phase")

    @property
    def step(self) -> int | None:
        step = self.fields.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None


def heartbeat_dir(log_dir: Path) -> Path | None:
    """Beside the logs; None, for a directory of this machine, if those are in an object store."""
    return log_dir.absolute() / "heartbeat" if paths.has_rename(log_dir) else None


class HeartbeatMonitor:
    """The heartbeats of one job.

    Attributes:
      highest_step: that any process reported, in any attempt; None without.
    """

    def __init__(
        self,
        directory: Path | None,
        timeouts: Timeouts,
        *,
        ranks_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Creates the directory if it is temporary.

        Args:
          directory: of the files; None for a new one on this machine, until `close`.
          ranks_only: `ctlrun`'s ranks count no steps and begin to beat in `hvd.init()`, so an idle one
            is not hung unless it is stopped.
        """
        self.highest_step: int | None = None
        self._is_temporary = directory is None
        self._dir = directory or Path(tempfile.mkdtemp(prefix="ctl-heartbeat-"))
        self._timeouts = timeouts
        self._ranks_only = ranks_only
        self._clock = clock
        self._seen: dict[str, _LastBeat] = {}  # by the name of the log
        self._busy: dict[str, tuple[int | None, float]] = {}  # processor time, and when it grew
        self._started_secs = self._checked_secs = clock()

    def environ(self, task: Topology) -> dict[str, str]:
        """The variable that names the file of one process."""
        is_off = self._ranks_only and not self._timeouts.heartbeat
        return {} if is_off else {HEARTBEAT_VARIABLE: str(self.path(task))}

    def close(self) -> None:
        """Deletes the files if they are temporary."""
        if self._is_temporary:
            shutil.rmtree(self._dir, ignore_errors=True)

    def path(self, task: Topology) -> Path:
        """The file of one process."""
        return self._dir / log_name(task).replace(".log", ".json")

    def reset(self, tasks: Iterable[Topology]) -> None:
        """A new attempt: deletes old files; a write error is ignored."""
        self._seen.clear()
        self._busy.clear()
        self._started_secs = self._checked_secs = self._clock()
        with contextlib.suppress(OSError):
            self._dir.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            self.forget(task)

    def forget(self, task: Topology) -> None:
        """The process is started again: its file is an old one."""
        self._seen.pop(log_name(task), None)
        self._busy.pop(log_name(task), None)
        with contextlib.suppress(OSError):
            self.path(task).unlink(missing_ok=True)

    def find_hang(self, group: ProcessGroup) -> Hang | None:
        """The same as `check` for a group, twice a second at most."""
        if self._clock() - self._checked_secs < _INTERVAL_SECS:
            return None
        return self.check(group.running, group.stopped, group.remote, group.cpu_ticks)

    def check(
        self,
        running: Iterable[Topology],
        stopped: Iterable[Topology] = (),
        remote: Iterable[Topology] = (),
        cpu_ticks: Callable[[], Mapping[str, int]] = dict,
    ) -> Hang | None:
        """Reads the files; returns the first process that is hung, if any.

        Args:
          stopped: those that the kernel calls stopped; remote: those whose files may not be visible.
          cpu_ticks: -> log_name -> processor time, which counts as life before the first heartbeat.
        """
        now = self._checked_secs = self._clock()
        running, stopped, remote = list(running), list(stopped), list(remote)
        for task in running:
            self.read(task)
        silent = [t for t in running if log_name(t) not in self._seen]
        needs_ticks = stopped or (self.any and not self._ranks_only)
        ticks = cpu_ticks() if silent and needs_ticks else {}
        for task in running:
            if log_name(task) in self._seen:
                hang = self._silence(task, now, task in stopped)
            else:
                hang = self._idle(task, now, task in stopped, ticks.get(log_name(task)))
            if hang:
                return hang
        return self._missing([t for t in running if trains(t) and t not in remote], now)

    def read(self, task: Topology) -> None:
        """Reads one file now; an unreadable one counts as unchanged."""
        try:
            content = self.path(task).read_bytes()
        except OSError:
            return
        now = self._clock()
        new = _LastBeat(BeatReader(self._clock), progressed_secs=now)
        seen = self._seen.setdefault(log_name(task), new)
        if not seen.reader.read(content):
            return
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(content)
            seen.fields = fields if isinstance(fields, dict) else {}
        progressed = (seen.fields.get("progressed"), seen.step, seen.phase)
        if progressed != seen.progressed:
            seen.progressed, seen.progressed_secs = progressed, now
        if seen.step is not None:
            self.highest_step = max(seen.step, self.highest_step or 0)

    def is_saving(self, tasks: Iterable[Topology]) -> bool:
        """True while one of them is in the middle of a save and alive; reads their files."""
        return self._is_any_in(tasks, "saving")

    def is_ending(self, tasks: Iterable[Topology]) -> bool:
        """True while one of them saves or has left its training, and is alive; reads their files."""
        return self._is_any_in(tasks, "saving", "ended")

    def _is_any_in(self, tasks: Iterable[Topology], *phases: str) -> bool:
        for task in tasks:
            self.read(task)
            seen = self._seen.get(log_name(task))
            if seen and seen.phase in phases and seen.reader.silent_secs < _SILENT_SECS:
                return True
        return False

    def has_trained(self, task: Topology) -> bool:
        """Whether the process had begun to train in this attempt."""
        seen = self._seen.get(log_name(task))
        return seen is not None and seen.phase in _TRAINED_PHASES

    @property
    def any(self) -> bool:
        """True once a process of this attempt has a heartbeat."""
        return bool(self._seen)

    def _silence(self, task: Topology, now: float, is_stopped: bool) -> Hang | None:
        seen, limits = self._seen[log_name(task)], self._timeouts
        silent = seen.reader.silent_secs
        known = seen.step is not None and not self._ranks_only
        last = f" (last at step {seen.step})" if known else ""
        if limits.heartbeat and silent >= self._patience(seen, now, is_stopped):
            return Hang(task, f"gave no sign of life for {silent:.0f} s{last}", silent)
        still = now - seen.progressed_secs
        if limits.hang and seen.phase == "training" and still >= limits.hang:
            return Hang(task, f"made no step for {still:.0f} s{last}", still)
        begins = trains(task) and seen.phase in ("starting", "compiling")
        if limits.hang and limits.startup and begins and still >= max(limits.hang, limits.startup):
            return Hang(task, f"was {seen.phase} for {still:.0f} s{last}", still)
        return None

    def _idle(self, task: Topology, now: float, is_stopped: bool, ticks: int | None) -> Hang | None:
        """A process before its first sign of life: stopped, or idle while others have given theirs."""
        limit = self._timeouts.heartbeat
        may_hang = is_stopped or (self.any and trains(task) and not self._ranks_only)
        ticks = ticks if limit and may_hang else None  # else it may be no program of ours
        before, since = self._busy.get(log_name(task), (-1, now))
        if ticks != before:
            self._busy[log_name(task)] = ticks, now
            return None
        if ticks is None or now - since < limit:
            return None
        what = "was stopped" if is_stopped else "did nothing"
        why = f"{what} for {now - since:.0f} s before its first sign of life"
        return Hang(task, why, now - since)

    def _patience(self, seen: _LastBeat, now: float, is_stopped: bool) -> float:
        """Seconds of silence. TensorFlow may stop every thread of Python while it connects to peers."""
        limits = self._timeouts
        starting = now - self._started_secs < limits.startup or not limits.startup
        if seen.phase == "connecting" and starting and not is_stopped:
            return float("inf")
        return max(limits.heartbeat, _ENDED_SECS if seen.phase == "ended" else 0.0)

    def _missing(self, running: list[Topology], now: float) -> Hang | None:
        limit, waited = self._timeouts.startup, now - self._started_secs
        absent = [t for t in running if log_name(t) not in self._seen]
        if not (limit and self.any and absent and waited >= limit):
            return None
        others = ", ".join(map(task_name, absent[1:]))
        why = f"gave no sign of life within {waited:.0f} s of the start"
        return Hang(absent[0], f"{why}, nor did {others}" if others else why, waited)
