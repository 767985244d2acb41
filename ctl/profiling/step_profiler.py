"""Measurement of `ctl profile`: averages of the step timers of all workers, then a trace of some steps."""

import contextlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from ctl.callbacks.schedule import Every
from ctl.config import Config
from ctl.data.batches import Batches
from ctl.distribute.engine_all_reduce import wire_dtype_of
from ctl.distribute.world import World
from ctl.io import paths
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import SharesLogged, TextLogged
from ctl.profiling import profile_report
from ctl.profiling.loop_observer import CompletedLoop, LoopObserver
from ctl.profiling.profile_report import StepProfile, WorkerTimes
from ctl.profiling.trace_window import TraceWindow, new_trace
from ctl.step.gradient_settings import Gradients
from ctl.step.reducers.reducer import has_one_replica_per_worker
from ctl.step.step_times import StepTimes

_log = logging.getLogger("ctl")
_MIN_LOOPS = 5
_MIN_SECS = 1.0  # in graph calls
_TRACED_STEPS = 5


class TimerWindow:
    """Averages of the timers over consecutive graph calls.

    The window starts at the end of a graph call. It restarts after a call that is not timed, and when
    calls become more than twice as long, as with automatic `steps_per_loop`.

    Args:
      read_waits: Returns `[2]`, the total time in sums and the total wait for input (seconds).

    Attributes:
      longest: Steps of the longest graph call.
    """

    def __init__(self, read_waits: Callable[[], np.ndarray]):
        self._read_waits = read_waits
        self._waits_before: np.ndarray | None = None  # at the start of the window
        self._ended_at: float | None = None  # of the newest graph call, None after a pause
        self.longest = 1
        self._num_loops = self._num_steps = self._num_host_steps = 0
        self._graph_secs = self._host_secs = 0.0

    @property
    def is_long_enough(self) -> bool:
        """The averages are representative."""
        return self._num_loops >= _MIN_LOOPS and self._graph_secs >= _MIN_SECS

    def add(self, steps: int, start: float, end: float) -> None:
        """Adds a graph call of `steps` steps; `start` and `end` are times of the clock (seconds)."""
        if self._waits_before is None or steps > 2 * self.longest:
            self.restart()
            self._waits_before, self.longest = self._read_waits(), max(1, steps)
        else:
            self._num_loops += 1
            self._num_steps += steps
            self._graph_secs += end - start
            self.longest = max(self.longest, steps)
            if self._ended_at is not None:
                self._num_host_steps += steps
                self._host_secs += start - self._ended_at
        self._ended_at = end

    def pause(self) -> None:
        """Excludes the time until the next graph call, as for a save or an evaluation."""
        self._ended_at = None

    def restart(self) -> None:
        """Starts a new window at the end of the next graph call."""
        self._waits_before = None
        self._num_loops = self._num_steps = self._num_host_steps = 0
        self._graph_secs = self._host_secs = 0.0

    def averages(self) -> np.ndarray:
        """Returns `[4]`, the fields of `WorkerTimes` (seconds per step)."""
        waits = np.full(2, np.nan)
        if self._waits_before is not None:
            waits = (self._read_waits() - self._waits_before) / max(1, self._num_steps)
        graph_call = self._graph_secs / max(1, self._num_steps)
        host = self._host_secs / max(1, self._num_host_steps)
        return np.array([graph_call, host, *waits])


@dataclass(frozen=True, kw_only=True)
class ProfiledRun:
    """The parts of a run that `ctl profile` reads.

    Attributes:
      model: Name of the trainer's class.
      config: Settings of the trainer.
      gradients: Settings of gradients.
      world: Processes of the job.
      writers: Metric writers.
      timer: Sums of the waiting times of this worker, or None.
      log_dir: Directory of TensorBoard's event files, or an empty string.
      save_every: Interval of saves, or None if the run has no checkpoints.
      is_first: False if an earlier run of this trainer has reported.
      on_report: Called before the report.
    """

    model: str
    config: Config
    gradients: Gradients
    world: World
    writers: WriterGroup
    timer: StepTimes | None
    log_dir: str
    save_every: Every | None
    is_first: bool
    on_report: Callable[[], None]


class StepProfiler(LoopObserver):
    """Reports the timers once, if `ctl profile` requests it from the chief. All workers take part."""

    def __init__(self, run: ProfiledRun):
        self._run = run
        self._window = TimerWindow(self._read_waits)
        self._save_secs: list[float] = []
        self._trace: TraceWindow | None = None
        self._json_path = profile_report.requested() if run.world.is_chief else None
        self._is_pending = self._json_path is not None and run.is_first
        if self._is_pending and run.world.is_asynchronous:
            self._is_pending = False
            _log.warning("ctl profile measures synchronous workers, not those of parameter servers.")

    def next_mark(self, step: int) -> int | None:
        """Returns the first or last step of the trace, or None."""
        return None if self._trace is None else self._trace.next_mark(step)

    def around(self, step: int) -> contextlib.AbstractContextManager[bool]:
        """Returns the context of the trace."""
        return super().around(step) if self._trace is None else self._trace.around(step)

    def completed(self, loop: CompletedLoop) -> None:
        """Adds the duration of a graph call to the window."""
        if loop.is_timed:
            self._window.add(loop.num_steps, loop.start, loop.end)
        else:
            self._window.restart()

    def pause(self) -> None:
        """Excludes the time until the next graph call."""
        self._window.pause()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measures a save."""
        start = time.perf_counter()
        yield
        self._save_secs.append(time.perf_counter() - start)

    def wants_report(self) -> bool:
        """Returns True once, on the chief, when enough steps were measured."""
        if not (self._is_pending and self._window.is_long_enough):
            return False
        self._is_pending = False
        return True

    def close(self) -> None:
        """Writes the trace, and warns at the end of a run without a report."""
        if self._trace is not None:
            self._trace.close()
        if self._is_pending:
            _log.warning(
                "ctl profile: the run ended before there was enough to measure: %d graph calls and %g s of "
                "training after the first ones. Give more steps.",
                _MIN_LOOPS,
                _MIN_SECS,
            )

    def report(self, step: int, batches: Batches, *, has_more_steps: bool) -> None:
        """Prints the report on the chief, and starts a trace of the next steps.

        All workers call it after the same step, because it sums the timers over workers.
        """
        self._run.on_report()
        times, world = self._times_of_workers(), self._run.world
        if has_more_steps and not self._run.config.profile:
            steps = f"{step}:{step + _TRACED_STEPS}"
            self._trace = new_trace(steps, self._run.log_dir, world.topology.worker_index)
        if world.is_chief:
            self._publish(self._profile(step, batches, times))

    def _read_waits(self) -> np.ndarray:
        times = self._run.timer
        return np.full(2, np.nan) if times is None else times.total()

    def _times_of_workers(self) -> tuple[WorkerTimes, ...]:
        world, topology = self._run.world, self._run.world.topology
        values = np.zeros([topology.num_workers, 4])
        values[topology.worker_index] = self._window.averages()
        values = np.asarray(world.host_all_reduce.sum(values.ravel())).reshape(values.shape)
        return tuple(WorkerTimes(*map(float, row)) for row in values)

    def _profile(self, step: int, batches: Batches, times: tuple[WorkerTimes, ...]) -> StepProfile:
        config, gradients, world = self._run.config, self._run.gradients, self._run.world
        is_averaging_possible = gradients.wire_dtype == gradients.cast_dtype and has_one_replica_per_worker(
            world.strategy, world.topology
        )
        can_send_16_bits = len(times) > 1 and wire_dtype_of(world.strategy, "bfloat16") is not None
        step_secs = times[0].graph_call + times[0].host
        return StepProfile(
            model=self._run.model,
            step=step,
            replicas=world.topology.num_replicas,
            global_batch_size=config.global_batch_size,
            times=times,
            steps_per_loop=self._window.longest,
            can_send_16_bits=can_send_16_bits and gradients.wire_dtype is None,
            jit_compile=config.jit_compile != "off",
            sync_every=config.sync_every if is_averaging_possible else None,
            in_memory=batches.is_in_memory,
            one_save=statistics.median(self._save_secs) if self._save_secs else 0.0,
            save_every=self._save_every(batches, step_secs),
        )

    def _save_every(self, batches: Batches, step_secs: float) -> float | None:
        """Returns the number of steps between two saves, or None if it is unknown."""
        interval = self._run.save_every
        if interval is None:
            return None
        if interval.secs:
            return max(1.0, interval.secs / step_secs)
        steps_per_epoch = batches.steps_per_epoch or 0
        return interval.steps or (interval.epochs and interval.epochs * steps_per_epoch) or None

    def _publish(self, profile: StepProfile) -> None:
        text = profile_report.profile_text(profile)
        print(text, flush=True)
        if self._trace is not None:
            print(f"trace of the next {_TRACED_STEPS} steps: {self._trace.path.parent}", flush=True)
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._run.writers.note(TextLogged(profile.step, "ctl profile", indented))
        shares = {name: secs / profile.step_secs for name, secs in profile.parts().items()}
        self._run.writers.note(SharesLogged(profile.step, "time shares", shares))
        if self._json_path:
            try:
                content = json.dumps(profile.as_json(), indent=1) + "\n"
                paths.write_atomically(paths.path(self._json_path), content)
            except OSError as e:
                reason = e.strerror or e
                _log.warning("%s cannot be written (%s); training continues.", self._json_path, reason)
