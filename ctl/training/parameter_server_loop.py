"""The training loop with parameter servers: calls of many steps go to workers, each at its own speed.

for each round until the next mark or `steps`:
    schedule calls; workers draw the steps of the round one by one
    join, then log, evaluate, save: each when its `Every` says so
    after_loop(step, means)        # the one hook; may ask to stop
save

A step is drawn as a number from a counter on a parameter server, so a round has exactly its steps
however they fall on workers, and what a lost worker had drawn is drawn again.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.batches import Batches
from ctl.distribute import parameter_servers
from ctl.metrics.protocol import Progressed, RunEnd
from ctl.step import update_lock
from ctl.step.replica_step import ReplicaStep
from ctl.supervision import heartbeat
from ctl.supervision.signals import Signals
from ctl.training import step_mistakes
from ctl.training.error_translation import ours
from ctl.training.graph_loop import TRACED_AGAIN
from ctl.training.loop import Loop, TrainLoop

_ROUND_SECS = 2.0  # between joins where no mark comes first
_LOOPS_PER_ROUND = 4
_NO_MORE = 2**62  # a number that no round reaches
_STALLED_SECS = 30.0
_LEAVE_SECS = 10.0  # a worker that is gone cannot end its step

_log = logging.getLogger("ctl")


class RoundLoop(TrainLoop):
    """As `TrainLoop`, in rounds; between two joins only the workers are busy."""

    has_other_processes = True
    _graph_loop: "ScheduledLoop"

    def loops(self, step: int, steps: int | None, signals: Signals) -> Iterator[Loop]:
        """From `step` to `steps` completed steps."""
        watch = Watch(self._graph_loop.completed, signals, self._writers.note)
        self._graph_loop.watch_with(watch)
        return super().loops(step, steps, signals)

    def _next_length(self, step: int, limits: list[int]) -> int:
        """Steps of the next round."""
        self._rate = self.interval.steps_per_sec() or self._rate
        length = self._length.length
        if self._length.auto:
            length *= _LOOPS_PER_ROUND
        else:
            self._graph_loop.limit_calls(length)
            length = max(length * self._graph_loop.num_workers, int(self._rate * _ROUND_SECS))
        return min([length, *limits])

    def _short(self, signalled: bool) -> RunEnd:
        """Returns the cause for which a round had fewer steps; never the end of the data, which repeats."""
        return RunEnd.SIGNAL if signalled else RunEnd.STOPPED


class Watch:
    """What the chief does while workers are busy: tells progress, sees signals, warns of a stall."""

    def __init__(
        self,
        completed: Callable[[], int],
        signals: Signals,
        note: Callable,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._completed, self._signals, self._note, self._clock = completed, signals, note, clock
        self._step, self._moved, self._looked, self._warned = -1, 0.0, 0.0, False
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._moved = self._looked = self._clock()

    def __call__(self) -> bool:
        """True if the round is to be cut short."""
        now = self._clock()
        if now - self._looked >= 1.0:
            self._looked, step = now, self._completed()
            if step != self._step:
                self._step, self._moved, self._warned = step, now, False
                self._note(Progressed(step))
                heartbeat.current.record_step(step)
            elif now - self._moved > _STALLED_SECS and not self._warned:
                self._warned = True
                _log.warning(
                    "No worker has completed a step for %.0f s, since step %d; still waiting. A lost "
                    "worker may be started again at its address.",
                    now - self._moved,
                    step,
                )
        return self._signals.received is not None


class ScheduledLoop:
    """Execution of a `ReplicaStep` on workers, in calls scheduled by a `ClusterCoordinator`.

    Args:
      strategy: Strategy with parameter servers.
      step: Step to run.
      counter: Number of completed steps.
      trained: Returns the identities of the trained variables, on which the trace depends.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: ReplicaStep,
        *,
        counter: tf.Variable,
        trained: Callable[[], tuple] = tuple,
    ):
        self._strategy, self._step, self._counter, self._trained = strategy, step, counter, trained
        self._traced_for: tuple | None = None  # what `trained` said
        self._coordinator = parameter_servers.coordinator(strategy)
        self.num_workers = parameter_servers.num_workers(strategy)
        with strategy.scope():
            self._drawn = tf.Variable(0, dtype=tf.int64, trainable=False, name="drawn")
        self._function = tf.function(self._draw, autograph=False)
        self._graph: Any = None  # of the trace
        self.totals, self.reducer = step.totals, step.reducer
        self._per_closure: int | None = None
        self._watch: Callable[[], bool] = lambda: False

    def watch_with(self, watch: Callable[[], bool]) -> None:
        """Sets a function that is polled while workers are busy. It returns True to end the round early."""
        self._watch = watch

    def limit_calls(self, steps: int) -> None:
        """Sets the largest number of steps in one call of a worker."""
        self._per_closure = steps

    def run(self, batches: Batches, steps: int, packed: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Runs `steps` steps, or fewer if the watch function ends the round.

        Returns:
          `packed` plus the totals of the steps, and the number of steps.
        """
        start = step = self.completed()
        results, cut = [], False
        while step < start + steps and not cut:
            self._drawn.assign(step)
            left = start + steps - step
            count, length = parameter_servers.closures(left, self._per_closure, self.num_workers)
            arguments = (batches.iterator, _int64(length), _int64(start + steps))
            results += [self._schedule(arguments) for _ in range(count)]
            cut = self._join(results)
            step = self.completed()  # fewer than drawn, where a worker was lost
        for result in results:
            packed = packed + np.asarray(result.fetch())
        return packed, step - start

    @property
    def calls_minimize(self) -> bool:
        """True if the traced step calls `minimize`."""
        return self._step.calls_minimize

    def completed(self) -> int:
        """Steps completed by all workers until now."""
        return int(self._counter.numpy())

    def _join(self, results: list) -> bool:
        """Waits until workers are idle; returns whether the round was cut short.

        Where it was, a worker that does not end its step is left behind, and with it the totals.
        """
        cut_at, pause = None, 0.001
        while not self._coordinator.done():
            if cut_at is None and self._watch():
                self._drawn.assign(_NO_MORE)
                cut_at = time.monotonic()
            if cut_at is not None and time.monotonic() - cut_at > _LEAVE_SECS:
                results.clear()
                return True
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        self._coordinator.join()
        return cut_at is not None

    def refresh(self) -> None:
        """The user's code has run, and may have changed which variables are trained."""
        if self._traced_for not in (None, self._trained()):
            _log.info(TRACED_AGAIN)
            self._function, self._traced_for = tf.function(self._draw, autograph=False), None

    def release(self) -> None:
        """Nothing is kept of the batches."""

    def trace(self, batches: Batches) -> None:
        """Workers trace when they get their first call."""

    @property
    def has_run(self) -> bool:
        """False until the first call, which also traces and compiles."""
        return self._graph is not None

    def graph_def(self) -> Any:
        """The graph of the step as a GraphDef, once something ran; None before."""
        return None if self._graph is None else self._graph.as_graph_def()

    def _schedule(self, arguments: Any) -> Any:
        try:
            return self._coordinator.schedule(self._function, arguments)
        except Exception as e:  # the first call traces, and AutoGraph wraps what it does not know
            raise (
                ours(e) or step_mistakes.explain_step_error(e, "one of train_data, for one worker") or e
            ) from None

    def _draw(self, iterator: Any, most: Any, until: Any) -> Any:
        """Up to `most` steps with numbers below `until`; their totals `[m, 2]`."""
        self._graph, self._traced_for = tf.compat.v1.get_default_graph(), self._trained()
        self._replica = self._step.function()

        def step(done: Any, packed: Any) -> tuple[Any, Any]:
            number = tf.raw_ops.ResourceCountUpTo(resource=self._drawn.handle, limit=_LIMIT, T=tf.int64)

            def act() -> tuple[Any, Any]:
                return done + 1, packed + self._one(next(iterator))

            return tf.cond(number < until, act, lambda: (most, packed))

        start = tf.constant(0, tf.int64), tf.zeros([1, 2], tf.float64)
        shapes = tf.TensorShape([]), tf.TensorShape([None, 2])
        return tf.while_loop(lambda done, _: done < most, step, start, shapes)[1]

    def _one(self, batch: Any) -> Any:
        before = len(tf.compat.v1.get_default_graph().get_operations())
        packed = self._strategy.run(self._replica, (batch,))
        update_lock.count_after(self._counter, packed, before)
        return packed


_LIMIT = 2**63 - 1


def _int64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)
