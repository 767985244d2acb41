"""Training loop: the length of graph calls, the due actions, and the end of the steps.

for loop in TrainLoop(...).loops(step, steps, interruption):
    loop.step      # number of completed steps
    loop.due       # actions on which the workers have agreed; `ctl.training.run` executes them
    loop.end       # the reason why this is the last one, or None
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from ctl.callbacks.schedule import NO_ACTION, Action, Timers, combined
from ctl.checkpoints.protocol import Manifest
from ctl.data.batches import Batches
from ctl.distribute.communication import PEER_ERRORS
from ctl.distribute.host_allreduce import HostAllReduce
from ctl.errors import EXIT_RETRY, CtlError
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import RunEnd, Traced
from ctl.profiling.loop_observer import CompletedLoop
from ctl.step.averaging import Totals
from ctl.step.reducers.reducer import GradientReducer
from ctl.supervision import heartbeat
from ctl.supervision.signals import Interruption
from ctl.training.loop_length import Interval, LoopLength
from ctl.training.marks import Marks
from ctl.training.observers import ObserverGroup
from ctl.training.pacing import Pacing

_log = logging.getLogger("ctl")
_PLANNED = Action.SAVE | Action.EVALUATE
_AGREE_SECS = 0.5  # interval of the agreement of workers, unless an action is due earlier


class Interrupted(Exception):
    """Raised on every worker if one of them receives a signal during an evaluation."""


class RollBack(Exception):
    """Raised when the run has returned from `step` to a checkpoint, which is restored."""

    def __init__(self, step: int, manifest: Manifest):
        super().__init__(f"back from step {step} to step {manifest.step}")
        self.step, self.manifest = step, manifest


class FailedElsewhere(CtlError):
    """Raised if an evaluation or a hook failed on another worker, which determines the exit code."""

    exit_code = EXIT_RETRY

    def __init__(self, phase: str = "The evaluation") -> None:
        super().__init__(f"{phase} failed on another worker; see the log of that worker.")


@dataclass(frozen=True)
class Loop:
    """A graph call and its consequences.

    Attributes:
      step: Number of completed steps.
      steps: Number of steps of this call.
      due: Actions that are due.
      end: Reason why no other call follows, or None.
      before: Sums before this call, for `Interval.means_since`.
    """

    step: int
    steps: int
    due: Action
    end: RunEnd | None
    before: np.ndarray | None


class Vote(NamedTuple):
    """Values that workers sum at the end of a loop. Only the chief sets the first six fields.

    Attributes:
      length: Number of steps of the next loop.
      wait: Number of steps until the next vote.
      log, evaluate, save, profile: 1 if the action is due by the clock or a request of the chief.
      stop: 1 if the worker requests the end of the run.
      failed: 1 if the user's hook has failed on the worker.
      sigterm, interrupt, time_limit: 1 if the worker has received the signal, or its time limit has passed.
    """

    length: float = 0.0
    wait: float = 0.0
    log: float = 0.0
    evaluate: float = 0.0
    save: float = 0.0
    profile: float = 0.0
    stop: float = 0.0
    failed: float = 0.0
    sigterm: float = 0.0
    interrupt: float = 0.0
    time_limit: float = 0.0

    @property
    def due(self) -> Action:
        """Returns the actions that are due by the chief's clock."""
        votes = {Action.LOG: self.log, Action.EVALUATE: self.evaluate, Action.SAVE: self.save}
        return combined(action for action, vote in {**votes, Action.PROFILE: self.profile}.items() if vote)


class GraphLoop(Protocol):
    """Execution of steps in graph calls: `StepLoop`, `CompiledLoop`, `ScheduledLoop`."""

    totals: Totals
    reducer: GradientReducer

    @property
    def has_run(self) -> bool:
        """True once a graph call has ended."""

    @property
    def calls_minimize(self) -> bool:
        """True if the traced step calls `minimize`."""

    def run(self, batches: Batches, steps: int, packed: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Runs steps. Returns the packed sums and the number of completed steps."""

    def trace(self, batches: Batches) -> None:
        """Traces the graph without running it."""

    def refresh(self) -> None:
        """Called after user code, which may have changed the set of trained variables."""

    def release(self) -> None:
        """Releases the batches of the newest call, so that their pipeline can end."""

    def graph_def(self) -> tf.compat.v1.GraphDef | None:
        """Returns the graph for TensorBoard, or None."""

    def pacing(self) -> Pacing:
        """Returns the policy of loop lengths."""


@dataclass(frozen=True)
class LoopHooks:
    """Functions that a loop calls, besides observers.

    Attributes:
      after_loop: Hook of the user with the step and the means of the loop. It returns True to stop. None
        costs no time.
      observes_weights: True if a callback may read the weights after any loop.
      requested_actions: Returns the actions that the user's code has requested since the last call.
    """

    after_loop: Callable[[int, dict[str, float]], object] | None = None
    observes_weights: bool = False
    requested_actions: Callable[[], Action] = lambda: NO_ACTION


class TrainLoop:
    """The steps of one call of `train`.

    Args:
      graph_loop: Runs steps in one graph call.
      batches: Training data.
      marks: Steps after which actions are due.
      agreement: Sums over workers.
      is_chief: True for the worker that reads the clock for actions with an interval in seconds.
      writers: Notified of the traced graph.
      observers: Observers of the graph calls.
      hooks: Functions to call after a graph call.

    Attributes:
      interval: Totals and times since the newest log.
    """

    def __init__(
        self,
        graph_loop: GraphLoop,
        batches: Batches,
        marks: Marks,
        agreement: HostAllReduce,
        *,
        is_chief: bool,
        writers: WriterGroup,
        observers: ObserverGroup = ObserverGroup(),  # noqa: B008  empty
        hooks: LoopHooks = LoopHooks(),
    ):
        self._graph_loop, self._batches, self._marks = graph_loop, batches, marks
        self._agreement, self._is_chief, self._writers = agreement, is_chief, writers
        self._observers, self._hooks = observers, hooks
        self.interval = Interval(graph_loop.totals)
        self._failure: Exception | None = None
        self._length = LoopLength(marks.intervals.steps_per_loop)
        self._timers = Timers(marks.intervals, time.perf_counter())
        self._has_equal_weights = True  # on all workers, after the newest loop
        self._agree_at = 0
        self._rate = 0.0  # steps per second, the newest known
        self._pacing = graph_loop.pacing()

    def loops(self, step: int, steps: int | None, interruption: Interruption) -> Iterator[Loop]:
        """Yields graph calls from `step` to `steps` completed steps, or to the end of the data if None."""
        self._agree_at = step
        self._pacing.begin(interruption, self._writers.note)
        mark = self._next_mark(step)
        end = None
        while end is None and (steps is None or step < steps):
            marks = (mark, steps, self._observers.next_mark(step))
            num_steps = max(1, self._next_length(step, [m - step for m in marks if m is not None]))
            before = self.interval.sums()
            ran = self._run(step, num_steps)
            step += ran
            due = NO_ACTION
            if step == mark:
                due = self.due(step)
                mark = self._next_mark(step)
            is_last = ran < num_steps or step == steps
            is_required = is_last or self._observes_weights or bool(due and due & _PLANNED)
            self._has_equal_weights = self._graph_loop.reducer.equalize_weights(step, is_required)
            stop = self._call_hook(step, ran)
            stop, due, signalled = self._agree(step, stop, due, interruption)
            if ran < num_steps:
                end = self._pacing.end_of_short_loop(signalled)
            elif stop or signalled:
                end = RunEnd.SIGNAL if signalled else RunEnd.STOPPED
            if due and Action.PROFILE in due:  # operations on enum.Flag are slow
                has_more_steps = end is None and step != steps
                self._observers.report(step, self._batches, has_more_steps=has_more_steps)
                due &= ~Action.PROFILE
            yield Loop(step, ran, due, end, before)
            if due or self._hooks.after_loop is not None:
                self._graph_loop.refresh()

    @property
    def failure(self) -> Exception | None:
        """The error of the user's hook, which ends the run after this loop, or None."""
        return self._failure

    def take_failure(self) -> Exception | None:
        """Returns and clears the error of the user's hook."""
        failure, self._failure = self._failure, None
        return failure

    def continue_with(self, batches: Batches) -> None:
        """Continues with the next pass over the data."""
        self._batches = batches

    def due(self, step: int) -> Action:
        """Returns the actions that are due after `step` by steps or epochs."""
        return self._marks.due(step, self._batches.steps_per_epoch)

    @property
    def _observes_weights(self) -> bool:
        return self._hooks.observes_weights or self._hooks.after_loop is not None

    def _next_mark(self, step: int) -> int | None:
        return self._marks.next_mark(step, self._batches.steps_per_epoch)

    def _next_length(self, step: int, limits: list[int]) -> int:
        self._rate = self.interval.steps_per_sec() or self._rate
        length = self._graph_loop.reducer.loop_length(step, self._length.length)
        return self._pacing.length(length, self._length.auto, self._rate, limits)

    def _run(self, step: int, num_steps: int) -> int:
        """Runs one graph call after `step`; returns its number of steps. The first call also compiles."""
        self.interval.begin_steps()
        is_compiled = self._graph_loop.has_run
        with self._observers.around(step) as is_slowed:
            start = time.perf_counter()
            with heartbeat.current.enter_phase(heartbeat.TRAINING if is_compiled else heartbeat.COMPILING):
                packed, ran = self._graph_loop.run(self._batches, num_steps, self.interval.packed)
            loop = CompletedLoop(step + ran, ran, start, time.perf_counter(), is_compiled and not is_slowed)
        self.interval.add(packed, ran, loop.secs)
        if loop.secs is not None:
            self._length.took(steps=ran, secs=loop.secs)
        if not is_compiled:
            self._writers.note(Traced(self._graph_loop.graph_def()))
        self._observers.completed(loop)
        return ran

    def _due_by_clock(self) -> Action:
        """Returns the actions that are due by time or by request."""
        due, requested = self._timers.due(time.perf_counter()), self._hooks.requested_actions()
        if requested:
            due |= requested
        return due | Action.PROFILE if self._observers.wants_report() else due

    def _call_hook(self, step: int, ran: int) -> bool:
        if self._hooks.after_loop is None or not ran:
            return False
        before = self.interval.sums()
        self.interval.fetch(self._agreement.sum)
        means = self.interval.means_since(before)
        try:
            return bool(self._hooks.after_loop(step, means))
        except Interrupted:  # by a signal, in an evaluation that the hook has called
            return True
        except Exception as e:
            if isinstance(e, CtlError) and not isinstance(e, FailedElsewhere):
                raise
            has_peers = self._pacing.has_other_processes or self._agreement.num_workers > 1
            if has_peers and isinstance(e, PEER_ERRORS):
                raise
            self._failure = e  # all workers stop at this step, and a checkpoint is saved
            return True

    def _agree(
        self, step: int, stop: bool, due: Action, interruption: Interruption
    ) -> tuple[bool, Action, bool]:
        """Returns (stop, due, signalled), equal on all workers.

        A run stops if one worker requests it. Actions are due by the clock of the chief.
        """
        if not self._has_equal_weights:  # weights cannot be saved here
            return stop, due, False
        if self._agreement.num_workers == 1:
            self._length.adopt(self._length.proposed)
            by_clock = self._due_by_clock()
            return stop, due | by_clock if by_clock else due, interruption.received is not None
        if step < self._agree_at and not due and self._hooks.after_loop is None:
            return stop, due, False
        sigterm, interrupt, time_limit = interruption.votes()
        has_failed = float(self._failure is not None)
        vote = Vote(
            stop=float(stop), failed=has_failed, sigterm=sigterm, interrupt=interrupt, time_limit=time_limit
        )
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
        total = Vote(*self._observers.sum_over_workers(vote, self._agreement.sum))
        self._length.adopt(int(total.length))
        self._agree_at = step + max(1, int(total.wait))
        if total.failed:  # so that no worker logs or evaluates before the last save
            self._failure = self._failure or FailedElsewhere("after_loop")
        signalled = interruption.apply_votes([total.sigterm, total.interrupt, total.time_limit])
        return bool(total.stop), due | total.due, signalled
