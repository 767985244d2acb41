"""The loop over steps: how many run in one graph call, what is due after it, and why it ends.

for loop in TrainLoop(...).loops(step, steps, signals):
    loop.step      # completed; workers have agreed on all that follows
    loop.due       # actions
    loop.end       # why this is the last one, or None

What is done about it is `ctl.training.run`'s.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from ctl.callbacks.schedule import NO_ACTION, Action, Every, Intervals, Timers, combined
from ctl.checkpoints.protocol import Manifest
from ctl.data.batches import Batches
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.errors import EXIT_RETRY, CtlError
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Progressed, RunEnd, Traced
from ctl.step.averaging import Totals
from ctl.step.reducers.reducer import GradientReducer
from ctl.supervision import heartbeat
from ctl.supervision.signals import Signals
from ctl.training.loop_length import Interval, LoopLength
from ctl.training.step_trace import StepTrace
from ctl.training.stragglers import Stragglers

_log = logging.getLogger("ctl")
_EPOCH = Every(epochs=1)
_PLANNED = Action.SAVE | Action.EVALUATE
_AGREE_SECS = 0.5  # how often workers agree when nothing else makes them


class Interrupted(Exception):
    """A signal came during an evaluation, the same on every worker."""


class RollBack(Exception):
    """The run goes back to a checkpoint, which is restored already; `step`: where it was."""

    def __init__(self, step: int, manifest: Manifest):
        super().__init__(f"back from step {step} to step {manifest.step}")
        self.step, self.manifest = step, manifest


class FailedElsewhere(CtlError):
    """Another worker's error ended the evaluation, or a hook; its exit code is the one that counts."""

    exit_code = EXIT_RETRY

    def __init__(self, what: str = "The evaluation") -> None:
        super().__init__(f"{what} failed on another worker; its log says why.")


@dataclass(frozen=True)
class Loop:
    """What one graph call did, and what follows from it.

    Attributes:
      step: completed steps; steps: those of this loop.
      due: Actions that are due.
      end: why no other loop follows, or None.
      before: what had been summed up before this loop, for `Interval.means_since`.
    """

    step: int
    steps: int
    due: Action
    end: RunEnd | None
    before: np.ndarray | None


class Vote(NamedTuple):
    """What workers add up at the end of a loop; the chief alone fills in the first six.

    Attributes:
      length: of the next loop; wait: steps until workers add up again.
      log, evaluate, save: 1 if the chief's clock says that it is due; profile: if `ctl profile` does.
      stop, sigterm, interrupt: 1 for each worker that wants to stop, or has received the signal.
    """

    length: float = 0.0
    wait: float = 0.0
    log: float = 0.0
    evaluate: float = 0.0
    save: float = 0.0
    profile: float = 0.0
    stop: float = 0.0
    sigterm: float = 0.0
    interrupt: float = 0.0

    @property
    def due(self) -> Action:
        """Returns the actions that are due by the chief's clock."""
        votes = {Action.LOG: self.log, Action.EVALUATE: self.evaluate, Action.SAVE: self.save}
        return combined(action for action, vote in {**votes, Action.PROFILE: self.profile}.items() if vote)


class GraphLoop(Protocol):
    """What runs the steps: `StepLoop` in step, `ScheduledLoop` with parameter servers."""

    totals: Totals
    reducer: GradientReducer

    @property
    def has_run(self) -> bool: ...
    @property
    def calls_minimize(self) -> bool: ...
    def run(self, batches: Batches, steps: int, packed: tf.Tensor) -> tuple[tf.Tensor, int]: ...
    def trace(self, batches: Batches) -> None: ...
    def refresh(self) -> None: ...
    def release(self) -> None: ...
    def graph_def(self) -> tf.compat.v1.GraphDef | None: ...


class Profiler(Protocol):
    """Receiver of the times of graph calls, which makes the report of `ctl profile`."""

    def ran(self, steps: int, start: float, end: float, *, is_timed: bool) -> None: ...
    def report(self, step: int, batches: Batches, *, has_more_steps: bool) -> StepTrace | None: ...


class TrainLoop:
    """Runs the steps of one call of `train`.

    Args:
      check_lease: raises if another job has taken model_dir over.
      after_loop: the hook (step, means of the loop) -> whether to stop; None costs nothing.

    Attributes:
      interval: totals and times since the newest log.
      failure: what the hook raised; the run ends after this loop.
      requested_actions: Returns the actions requested by the hook or `ctl profile`; the chief's count.
      epochs: Action.END_EPOCH becomes due.
      stragglers: compares the workers in step, or None.
      trace: The steps to trace, or None; profiler: Receives the times of graph calls, or None.
      observes_weights: True if a callback may read the weights after any loop.
    """

    several = False  # other processes take part, whatever the number of workers in step

    def __init__(
        self,
        graph_loop: GraphLoop,
        batches: Batches,
        intervals: Intervals,
        agreement: HostAllReduce,
        *,
        is_chief: bool,
        writers: WriterGroup,
        check_lease: Callable[[], None] = lambda: None,
        after_loop: Callable[[int, dict[str, float]], object] | None = None,
    ):
        self._graph_loop, self._batches, self._intervals = graph_loop, batches, intervals
        self._agreement, self._is_chief, self._writers = agreement, is_chief, writers
        self._check_lease, self._after_loop = check_lease, after_loop
        self.interval = Interval(graph_loop.totals)
        self.failure: Exception | None = None
        self._length = LoopLength(intervals.steps_per_loop)
        self._timers = Timers(intervals, time.perf_counter())
        self.requested_actions: Callable[[], Action] = lambda: NO_ACTION
        self.epochs = False
        self.stragglers: Stragglers | None = None
        self.trace: StepTrace | None = None
        self.profiler: Profiler | None = None
        self.observes_weights = after_loop is not None
        self._has_equal_weights = True  # on all workers, after the newest loop
        self._agree_at = 0
        self._rate = 0.0  # steps per second, the newest known

    def loops(self, step: int, steps: int | None, signals: Signals) -> Iterator[Loop]:
        """From `step` to `steps` completed steps, or to the end of the data if None."""
        self._agree_at = step
        mark = self._next_mark(step)
        end = None
        while end is None and (steps is None or step < steps):
            marks = (mark, steps, self.trace.next_mark(step) if self.trace else None)
            limits = [e - step for e in marks if e is not None]
            asked = max(1, self._next_length(step, limits))
            self.interval.begin_steps()
            before = self.interval.sums()
            with self.trace.around(step) if self.trace else contextlib.nullcontext(False) as traced:
                ran = self._run(asked, timed=not traced)
            step += ran
            self._check_lease()
            self._writers.note(Progressed(step))
            heartbeat.current.record_step(step)
            due = NO_ACTION
            if step == mark:
                due = self.due(step)
                mark = self._next_mark(step)
            is_required = self.observes_weights or bool(due & _PLANNED) or ran < asked or step == steps
            self._has_equal_weights = self._graph_loop.reducer.equalize_weights(step, is_required)
            stop = self._hook(step, ran)
            stop, due, signalled = self._agree(step, stop, due, signals)
            if ran < asked:
                end = self._short(signalled)
            elif stop or signalled:
                end = RunEnd.SIGNAL if signalled else RunEnd.STOPPED
            if Action.PROFILE in due and self.profiler is not None:
                has_more_steps = end is None and step != steps
                trace = self.profiler.report(step, self._batches, has_more_steps=has_more_steps)
                self.trace = self.trace or trace
            due &= ~Action.PROFILE
            yield Loop(step, ran, due, end, before)
            if due or self._after_loop is not None:
                self._graph_loop.refresh()

    def go_on_with(self, batches: Batches) -> None:
        """A pass over the data has ended, and the next ones are open; or the length is known now."""
        self._batches = batches

    def due(self, step: int) -> Action:
        """Returns the actions that are due at `step` by steps or epochs."""
        per_epoch = self._batches.steps_per_epoch
        due = self._intervals.due(step, per_epoch)
        return due | Action.END_EPOCH if self.epochs and _EPOCH.is_mark(step, per_epoch) else due

    def _next_mark(self, step: int) -> int | None:
        per_epoch = self._batches.steps_per_epoch
        mark = self._intervals.next_mark(step, per_epoch)
        ends = [_EPOCH.next_mark(step, per_epoch)] if self.epochs else []
        return min((m for m in (mark, *ends) if m is not None), default=None)

    def _next_length(self, step: int, limits: list[int]) -> int:
        length = self._graph_loop.reducer.loop_length(step, self._length.length)
        return min([length, *limits])

    def _short(self, signalled: bool) -> RunEnd:
        """Returns the cause for which a loop ran fewer steps than requested."""
        return RunEnd.DATA_ENDED

    def _run(self, asked: int, *, timed: bool = True) -> int:
        """One graph call; returns the steps that it ran. The first one also compiles, and is not timed."""
        compiled, start = self._graph_loop.has_run, time.perf_counter()
        with heartbeat.current.enter_phase(heartbeat.TRAINING if compiled else heartbeat.COMPILING):
            self.interval.packed, ran = self._graph_loop.run(self._batches, asked, self.interval.packed)
        secs = (end := time.perf_counter()) - start
        if self.profiler is not None:
            self.profiler.ran(ran, start, end, is_timed=compiled and timed)
        self.interval.ran(ran, secs if compiled and timed else None)
        if self.stragglers is not None:
            self.stragglers.ran(ran, secs if compiled and timed else None)
        if compiled and timed:
            self._length.took(steps=ran, secs=secs)
        if not compiled:
            self._writers.note(Traced(self._graph_loop.graph_def()))
        return ran

    def _due_by_clock(self) -> Action:
        """Returns the actions that are due by time or by request."""
        return self._timers.due(time.perf_counter()) | self.requested_actions()

    def _hook(self, step: int, ran: int) -> bool:
        if self._after_loop is None or not ran:
            return False
        before = self.interval.sums()
        self.interval.fetch(self._agreement.sum)
        means = self.interval.means_since(before)
        try:
            return bool(self._after_loop(step, means))
        except Interrupted:  # by a signal, in an evaluation of the hook's own
            return True
        except Exception as e:
            if isinstance(e, CtlError) and not isinstance(e, FailedElsewhere):
                raise
            if (self.several or self._agreement.num_workers > 1) and isinstance(e, PEER_ERRORS):
                raise
            self.failure = e  # all workers stop at this step, and what was done is saved
            return True

    def _agree(self, step: int, stop: bool, due: Action, signals: Signals) -> tuple[bool, Action, bool]:
        """Returns (stop, due, signalled), equal on all workers.

        A run stops if one worker requests it. Actions are due by the clock of the chief.
        """
        if not self._has_equal_weights:  # what no step makes due waits until weights can be saved
            return stop, due, False
        if self._agreement.num_workers == 1:
            self._length.length = self._length.proposed
            return stop, due | self._due_by_clock(), signals.received is not None
        if step < self._agree_at and not due and self._after_loop is None:
            return stop, due, False
        sigterm, interrupt = signals.votes()
        vote = Vote(stop=float(stop), sigterm=sigterm, interrupt=interrupt)
        if self._is_chief:
            self._rate = self.interval.steps_per_sec() or self._rate
            by_clock = self._due_by_clock()
            vote = vote._replace(
                length=self._length.proposed,
                wait=self._rate * _AGREE_SECS,
                log=float(Action.LOG in by_clock),
                evaluate=float(Action.EVALUATE in by_clock),
                save=float(Action.SAVE in by_clock),
                profile=float(Action.PROFILE in by_clock),
            )
        total = self._sum_of_votes(vote)
        self._length.length = int(total.length)
        self._agree_at = step + max(1, int(total.wait))
        signalled = signals.apply_votes([total.sigterm, total.interrupt])
        return bool(total.stop), due | total.due, signalled

    def _sum_of_votes(self, vote: Vote) -> Vote:
        """Over workers; the seconds that each has waited travel with them."""
        if self.stragglers is None:
            return Vote(*self._agreement.sum(vote))
        total = self._agreement.sum([*vote, *self.stragglers.mine()])
        self.stragglers.compare(total[len(vote) :])
        return Vote(*total[: len(vote)])
