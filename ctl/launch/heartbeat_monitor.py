"""Detection of hung processes: heartbeats, confirmed by the processor time of the process tree.

    heartbeats = HeartbeatMonitor(log_dir / "heartbeat", timeouts)
    heartbeats.reset(tasks)                      # before an attempt: clears old heartbeats
    environ |= heartbeats.environ(task)
    ...
    hang = heartbeats.find_hang(group)           # None, or the hung process and the reason

A heartbeat is one JSON object: pid, step, phase, and the seconds `beat` and `progressed` by the clock of
the process. `BeatStore` provides the files. Only changes count, by a clock that pauses while the launcher
does not run. A silent process of this machine is hung only if it is stopped or its process tree uses almost
no processor time. A process without any heartbeat is hung only if it is stopped, or idle while other
processes send theirs.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ctl.distribute.topology import Topology
from ctl.io import paths
from ctl.launch.beat_store import BeatStore
from ctl.launch.process_activity import ActivityTable
from ctl.launch.process_group import ProcessGroup
from ctl.launch.roles import log_name, task_name, trains
from ctl.supervision.beat_file import BeatReader, PollClock
from ctl.supervision.heartbeat import HEARTBEAT_VARIABLE

_INTERVAL_SECS = 0.5  # between two checks: many files take time
_SUSPECT_SECS = 2.0  # of silence, after which processor time is measured
_SILENT_SECS = 5.0  # after which a process that saves or ends counts as dead
_TRAINED_PHASES = ("compiling", "training", "evaluating", "saving", "ended")
_LEAST_IDLE_SECS = 1.5  # minimum duration of the measured idle time, for any timeout
_ENDED_SECS = 300.0  # for a process in phase "ended", to end


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Durations after which a process counts as hung (seconds). 0 disables a timeout.

    Attributes:
      heartbeat: Without any change.
      hang: Without a new step while training.
      startup: From the start of the attempt to the first heartbeat, if other processes have sent one. If
        `hang` is set, also the limit for the phases before the first step.
    """

    heartbeat: float = 60.0
    hang: float = 0.0
    startup: float = 600.0


@dataclass(frozen=True)
class Hang:
    """A process that counts as hung. `why` continues a sentence that begins with its name."""

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
    """Returns the directory beside the logs, or None (a local directory) if they are in an object store."""
    return log_dir.absolute() / "heartbeat" if paths.has_rename(log_dir) else None


class HeartbeatMonitor:
    """The heartbeats of one job.

    Attributes:
      highest_step: Highest step that any process has reported in any attempt, or None.
    """

    def __init__(
        self,
        directory: Path | None,
        timeouts: Timeouts,
        *,
        ranks_only: bool = False,
        clock: Callable[[], float] | None = None,
    ):
        """Stores the settings.

        Args:
          directory: Directory of the heartbeats of other machines, if they can access it.
          timeouts: Timeouts of the job.
          ranks_only: True for `ctlrun`. Its ranks do not count steps and begin to beat in `hvd.init()`, so
            an idle one is not hung unless it is stopped.
          clock: Seconds. Defaults to a clock that pauses while the launcher does not run.
        """
        self.highest_step: int | None = None
        self._store = BeatStore(directory)
        self._timeouts = timeouts
        self._ranks_only = ranks_only
        self._clock = clock = clock or PollClock()
        self._seen: dict[str, _LastBeat] = {}  # by the name of the log
        self._suspect_secs = min(_SUSPECT_SECS, timeouts.heartbeat / 2)
        self._activity = ActivityTable()
        self._started_secs = self._checked_secs = clock()

    def environ(self, task: Topology, *, is_remote: bool = False) -> dict[str, str]:
        """Returns the variable that names the heartbeat file of one process."""
        is_off = self._ranks_only and not self._timeouts.heartbeat
        return {} if is_off else {HEARTBEAT_VARIABLE: str(self.path(task, is_remote=is_remote))}

    def close(self) -> None:
        """Releases all files."""
        self._store.close()

    def path(self, task: Topology, *, is_remote: bool = False) -> Path:
        """Returns the file that one process writes; creates a file in memory if the process is local."""
        return self._store.path(log_name(task), is_remote=is_remote)

    def reset(self, tasks: Iterable[Topology]) -> None:
        """Starts an attempt: clears old heartbeats, and ignores processes of earlier attempts."""
        self._store.begin_attempt()
        self._seen.clear()
        self._activity.clear()
        self._started_secs = self._checked_secs = self._clock()
        for task in tasks:
            self.forget(task)

    def forget(self, task: Topology) -> None:
        """Clears the heartbeat of a process that is started again."""
        self._seen.pop(log_name(task), None)
        self._activity.forget(log_name(task))
        self._store.clear(log_name(task))

    def release(self, task: Topology) -> None:
        """Releases the file of a process that has ended and is not started again."""
        self.forget(task)
        self._store.release(log_name(task))

    def find_hang(self, group: ProcessGroup) -> Hang | None:
        """Calls `check` for a group, at most twice a second."""
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
        """Reads the files. Returns the first hung process, if any.

        Args:
          running: Processes to check.
          stopped: Processes in the kernel's state "stopped".
          remote: Processes with files that may not be visible.
          cpu_ticks: Returns the processor time of each process tree of this machine by the name of its
            log. Called only while a process is suspect.
        """
        now_secs = self._checked_secs = self._clock()
        running, stopped, remote = list(running), list(stopped), list(remote)
        for task in running:
            self.read(task)
        suspects = {log_name(t): t in stopped for t in running if self._is_suspect(t, t in stopped)}
        self._activity.measure(suspects, now_secs, cpu_ticks)
        for task in running:
            if log_name(task) in self._seen:
                hang = self._silence(task, now_secs, task in stopped)
            else:
                hang = self._idle(task, now_secs, task in stopped)
            if hang:
                return hang
        return self._missing([t for t in running if trains(t) and t not in remote], now_secs)

    def _is_suspect(self, task: Topology, is_stopped: bool) -> bool:
        seen, limit = self._seen.get(log_name(task)), self._timeouts.heartbeat
        if seen is None:
            return is_stopped or (self.any and trains(task) and not self._ranks_only)
        return bool(limit) and seen.reader.silent_secs >= self._suspect_secs

    def read(self, task: Topology) -> None:
        """Reads one heartbeat now. A file that cannot be read is no evidence of silence."""
        content, seen = self._store.read(log_name(task)), self._seen.get(log_name(task))
        if not content:
            if seen is not None:
                seen.reader.restart()
            return
        now_secs = self._clock()
        new = _LastBeat(BeatReader(self._clock), progressed_secs=now_secs)
        seen = self._seen.setdefault(log_name(task), new)
        if not seen.reader.read(content):
            return
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(content)
            seen.fields = fields if isinstance(fields, dict) else {}
        progressed = (seen.fields.get("progressed"), seen.step, seen.phase)
        if progressed != seen.progressed:
            seen.progressed, seen.progressed_secs = progressed, now_secs
        if seen.step is not None:
            self.highest_step = max(seen.step, self.highest_step or 0)

    def is_saving(self, tasks: Iterable[Topology]) -> bool:
        """Returns True while one of the tasks is saving and alive. Reads their files."""
        return self._is_any_in(tasks, "saving")

    def is_ending(self, tasks: Iterable[Topology]) -> bool:
        """Returns True while one of them saves or has left its training, and is alive. Reads files."""
        return self._is_any_in(tasks, "saving", "ended")

    def _is_any_in(self, tasks: Iterable[Topology], *phases: str) -> bool:
        for task in tasks:
            self.read(task)
            seen = self._seen.get(log_name(task))
            if seen and seen.phase in phases and seen.reader.silent_secs < _SILENT_SECS:
                return True
        return False

    def has_trained(self, task: Topology) -> bool:
        """Returns True if the process had begun to train in this attempt."""
        seen = self._seen.get(log_name(task))
        return seen is not None and seen.phase in _TRAINED_PHASES

    @property
    def any(self) -> bool:
        """True once a process of this attempt has a heartbeat."""
        return bool(self._seen)

    def _silence(self, task: Topology, now_secs: float, is_stopped: bool) -> Hang | None:
        seen, limits = self._seen[log_name(task)], self._timeouts
        silent = seen.reader.silent_secs
        known = seen.step is not None and not self._ranks_only
        last = f" (last at step {seen.step})" if known else ""
        patience = self._patience(seen, now_secs, is_stopped)
        idle_limit_secs = max(limits.heartbeat - self._suspect_secs, _LEAST_IDLE_SECS)
        is_idle = self._activity.idle_secs(log_name(task), now_secs) >= idle_limit_secs
        if limits.heartbeat and silent >= patience and is_idle:
            return Hang(task, f"gave no sign of life for {silent:.0f} s{last}", silent)
        still = now_secs - seen.progressed_secs
        if limits.hang and seen.phase == "training" and still >= limits.hang:
            return Hang(task, f"made no step for {still:.0f} s{last}", still)
        begins = trains(task) and seen.phase in ("starting", "compiling")
        if limits.hang and limits.startup and begins and still >= max(limits.hang, limits.startup):
            return Hang(task, f"was {seen.phase} for {still:.0f} s{last}", still)
        return None

    def _idle(self, task: Topology, now_secs: float, is_stopped: bool) -> Hang | None:
        """Returns a hang before the first heartbeat: stopped, or idle while other processes send theirs."""
        limit, activity = self._timeouts.heartbeat, self._activity.get(log_name(task))
        if not limit or activity is None or not activity.is_measured:
            return None
        unchanged_secs = activity.unchanged_secs(now_secs)
        if unchanged_secs < limit:
            return None
        verb = "was stopped" if is_stopped else "did nothing"
        reason = f"{verb} for {unchanged_secs:.0f} s before its first sign of life"
        return Hang(task, reason, unchanged_secs)

    def _patience(self, seen: _LastBeat, now_secs: float, is_stopped: bool) -> float:
        """Returns the silence limit (seconds). TensorFlow may block all threads while it connects."""
        limits = self._timeouts
        starting = now_secs - self._started_secs < limits.startup or not limits.startup
        if seen.phase == "connecting" and starting and not is_stopped:
            return float("inf")
        return max(limits.heartbeat, _ENDED_SECS if seen.phase == "ended" else 0.0)

    def _missing(self, running: list[Topology], now_secs: float) -> Hang | None:
        limit, waited = self._timeouts.startup, now_secs - self._started_secs
        absent = [t for t in running if log_name(t) not in self._seen]
        if not (limit and self.any and absent and waited >= limit):
            return None
        absent = [t for t in absent if self._activity.idle_secs(log_name(t), now_secs) >= _LEAST_IDLE_SECS]
        if not absent:
            return None
        others = ", ".join(map(task_name, absent[1:]))
        why = f"gave no sign of life within {waited:.0f} s of the start"
        return Hang(absent[0], f"{why}, nor did {others}" if others else why, waited)
