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
from ctl.launch.roles import is_training_task, log_name, task_name
from ctl.supervision.beat_file import BeatReader, PollClock
from ctl.supervision.heartbeat import HEARTBEAT_VARIABLE

_INTERVAL_SECS = 0.5  # between two checks: many files take time
_SUSPECT_SECS = 2.0  # of silence, after which processor time is measured
_SILENT_SECS = 5.0  # after which a process that saves or ends counts as dead
_TRAINED_PHASES = ("compiling", "training", "evaluating", "saving", "ended")
_MIN_IDLE_SECS = 1.5  # minimum duration of the measured idle time, for any timeout
_EXIT_SECS = 300.0  # for a process in phase "ended" to exit


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
    """A process that counts as hung. `description` is the end of a sentence that begins with its name."""

    task: Topology
    description: str
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
    """Detector of hung processes by the heartbeats of one job.

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
          ranks_only: True for `ctlrun`. Its ranks do not count steps. Their heartbeats start in
            `hvd.init()`, so an idle rank is not hung unless it is stopped.
          clock: Seconds. Defaults to a clock that pauses while the launcher does not run.
        """
        self.highest_step: int | None = None
        self._store = BeatStore(directory)
        self._timeouts = timeouts
        self._ranks_only = ranks_only
        self._clock = clock = clock or PollClock()
        self._last_beats: dict[str, _LastBeat] = {}  # by the name of the log
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
        self._last_beats.clear()
        self._activity.clear()
        self._started_secs = self._checked_secs = self._clock()
        for task in tasks:
            self.forget(task)

    def forget(self, task: Topology) -> None:
        """Clears the heartbeat of a process that is started again."""
        self._last_beats.pop(log_name(task), None)
        self._activity.forget(log_name(task))
        self._store.clear(log_name(task))

    def release(self, task: Topology) -> None:
        """Releases the file of a process that has ended and is not started again."""
        self.forget(task)
        self._store.release(log_name(task))

    def find_hang(self, group: ProcessGroup) -> Hang | None:
        """Calls `check` for the processes of a group, at most twice a second."""
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
            if log_name(task) in self._last_beats:
                hang = self._find_silence(task, now_secs, task in stopped)
            else:
                hang = self._find_idle_start(task, now_secs, task in stopped)
            if hang:
                return hang
        return self._find_missing([t for t in running if is_training_task(t) and t not in remote], now_secs)

    def _is_suspect(self, task: Topology, is_stopped: bool) -> bool:
        last_beat, limit = self._last_beats.get(log_name(task)), self._timeouts.heartbeat
        if last_beat is None:
            return is_stopped or (self.has_heartbeats and is_training_task(task) and not self._ranks_only)
        return bool(limit) and last_beat.reader.silent_secs >= self._suspect_secs

    def read(self, task: Topology) -> None:
        """Reads one heartbeat now. A file that cannot be read is no evidence of silence."""
        content, last_beat = self._store.read(log_name(task)), self._last_beats.get(log_name(task))
        if not content:
            if last_beat is not None:
                last_beat.reader.restart()
            return
        now_secs = self._clock()
        new = _LastBeat(BeatReader(self._clock), progressed_secs=now_secs)
        last_beat = self._last_beats.setdefault(log_name(task), new)
        if not last_beat.reader.read(content):
            return
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(content)
            last_beat.fields = fields if isinstance(fields, dict) else {}
        progressed = (last_beat.fields.get("progressed"), last_beat.step, last_beat.phase)
        if progressed != last_beat.progressed:
            last_beat.progressed, last_beat.progressed_secs = progressed, now_secs
        if last_beat.step is not None:
            self.highest_step = max(last_beat.step, self.highest_step or 0)

    def is_saving(self, tasks: Iterable[Topology]) -> bool:
        """Returns True while one of the tasks is saving and alive. Reads their files."""
        return self._is_any_in_phase(tasks, "saving")

    def is_ending(self, tasks: Iterable[Topology]) -> bool:
        """Returns True while one of the tasks is alive and saving or ending. Reads their files."""
        return self._is_any_in_phase(tasks, "saving", "ended")

    def _is_any_in_phase(self, tasks: Iterable[Topology], *phases: str) -> bool:
        for task in tasks:
            self.read(task)
            last_beat = self._last_beats.get(log_name(task))
            if last_beat and last_beat.phase in phases and last_beat.reader.silent_secs < _SILENT_SECS:
                return True
        return False

    def has_trained(self, task: Topology) -> bool:
        """Returns True if the process had begun to train in this attempt."""
        last_beat = self._last_beats.get(log_name(task))
        return last_beat is not None and last_beat.phase in _TRAINED_PHASES

    @property
    def has_heartbeats(self) -> bool:
        """True once a process of this attempt has a heartbeat."""
        return bool(self._last_beats)

    def _find_silence(self, task: Topology, now_secs: float, is_stopped: bool) -> Hang | None:
        last_beat, limits = self._last_beats[log_name(task)], self._timeouts
        silent_secs = last_beat.reader.silent_secs
        has_step = last_beat.step is not None and not self._ranks_only
        last_step = f" (last at step {last_beat.step})" if has_step else ""
        silence_limit_secs = self._silence_limit_secs(last_beat, now_secs, is_stopped)
        idle_limit_secs = max(limits.heartbeat - self._suspect_secs, _MIN_IDLE_SECS)
        is_idle = self._activity.idle_secs(log_name(task), now_secs) >= idle_limit_secs
        if limits.heartbeat and silent_secs >= silence_limit_secs and is_idle:
            return Hang(task, f"sent no heartbeat for {silent_secs:.0f} s{last_step}", silent_secs)
        unchanged_secs = now_secs - last_beat.progressed_secs
        if limits.hang and last_beat.phase == "training" and unchanged_secs >= limits.hang:
            return Hang(task, f"completed no step for {unchanged_secs:.0f} s{last_step}", unchanged_secs)
        is_starting = is_training_task(task) and last_beat.phase in ("starting", "compiling")
        if (
            limits.hang
            and limits.startup
            and is_starting
            and unchanged_secs >= max(limits.hang, limits.startup)
        ):
            return Hang(
                task, f"was {last_beat.phase} for {unchanged_secs:.0f} s{last_step}", unchanged_secs
            )
        return None

    def _find_idle_start(self, task: Topology, now_secs: float, is_stopped: bool) -> Hang | None:
        """Returns a hang before the first heartbeat: stopped, or idle while other processes send theirs."""
        limit, activity = self._timeouts.heartbeat, self._activity.get(log_name(task))
        if not limit or activity is None or not activity.is_measured:
            return None
        unchanged_secs = activity.unchanged_secs(now_secs)
        if unchanged_secs < limit:
            return None
        condition = "was stopped" if is_stopped else "was idle"
        reason = f"{condition} for {unchanged_secs:.0f} s before its first heartbeat"
        return Hang(task, reason, unchanged_secs)

    def _silence_limit_secs(self, last_beat: _LastBeat, now_secs: float, is_stopped: bool) -> float:
        """Returns the silence limit (seconds). TensorFlow may block all threads while it connects."""
        limits = self._timeouts
        is_in_startup = now_secs - self._started_secs < limits.startup or not limits.startup
        if last_beat.phase == "connecting" and is_in_startup and not is_stopped:
            return float("inf")
        return max(limits.heartbeat, _EXIT_SECS if last_beat.phase == "ended" else 0.0)

    def _find_missing(self, running: list[Topology], now_secs: float) -> Hang | None:
        limit, waited_secs = self._timeouts.startup, now_secs - self._started_secs
        absent = [t for t in running if log_name(t) not in self._last_beats]
        if not (limit and self.has_heartbeats and absent and waited_secs >= limit):
            return None
        absent = [t for t in absent if self._activity.idle_secs(log_name(t), now_secs) >= _MIN_IDLE_SECS]
        if not absent:
            return None
        other_names = ", ".join(map(task_name, absent[1:]))
        description = f"sent no heartbeat within {waited_secs:.0f} s of the start"
        return Hang(
            absent[0], f"{description}, nor did {other_names}" if other_names else description, waited_secs
        )
