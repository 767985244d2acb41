"""Steps with parameter servers, in rounds of calls that workers execute asynchronously.

Each step of a round takes a number from a counter on a parameter server. A round therefore has exactly its
number of steps, however they are distributed over workers, and the steps of a lost worker are repeated.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.batches import Batches
from ctl.distribute import parameter_servers
from ctl.io.error_report import ctl_error_in
from ctl.parameter_server import update_lock
from ctl.parameter_server.rounds import RoundPacing
from ctl.step import step_mistakes
from ctl.step.replica_step import RETRACE_MESSAGE, ReplicaStep

_NO_MORE = 2**62  # a number that no round reaches
_LEAVE_SECS = 10.0  # a worker that is gone cannot end its step

_log = logging.getLogger("ctl")


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
        self._traced_for: tuple | None = None  # the result of `trained`
        self._coordinator = parameter_servers.coordinator(strategy)
        self.num_workers = parameter_servers.num_workers(strategy)
        with strategy.scope():
            self._next_step = tf.Variable(0, dtype=tf.int64, trainable=False, name="next_step")
        self._function = tf.function(self._run_steps, autograph=False)
        self._graph: Any = None  # of the trace
        self.totals, self.reducer = step.totals, step.reducer
        self._per_closure: int | None = None
        self._watch: Callable[[], bool] = lambda: False

    def pacing(self) -> RoundPacing:
        """Returns the lengths of rounds."""
        return RoundPacing(self)

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
        results, is_ended = [], False
        while step < start + steps and not is_ended:
            self._next_step.assign(step)
            remaining = start + steps - step
            count, length = parameter_servers.closures(remaining, self._per_closure, self.num_workers)
            arguments = (batches.iterator, _int64(length), _int64(start + steps))
            results += [self._schedule(arguments) for _ in range(count)]
            is_ended = self._join(results)
            step = self.completed()  # fewer than taken, if a worker was lost
        for result in results:
            packed = packed + np.asarray(result.fetch())
        return packed, step - start

    @property
    def calls_minimize(self) -> bool:
        """True if the traced step calls `minimize`."""
        return self._step.calls_minimize

    def completed(self) -> int:
        """Returns the number of steps that all workers have completed."""
        return int(self._counter.numpy())

    def _join(self, results: list) -> bool:
        """Waits until workers are idle. Returns True if the watch function has ended the round early.

        A worker that does not end its step then is abandoned, with the totals of the round.
        """
        ended_at, pause = None, 0.001
        while not self._coordinator.done():
            if ended_at is None and self._watch():
                self._next_step.assign(_NO_MORE)
                ended_at = time.monotonic()
            if ended_at is not None and time.monotonic() - ended_at > _LEAVE_SECS:
                results.clear()
                return True
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        self._coordinator.join()
        return ended_at is not None

    def refresh(self) -> None:
        """Discards the trace if the set of trained variables has changed."""
        if self._traced_for not in (None, self._trained()):
            _log.info(RETRACE_MESSAGE)
            self._function, self._traced_for = tf.function(self._run_steps, autograph=False), None

    def release(self) -> None:
        """No-op: the loop does not hold the batches."""

    def trace(self, batches: Batches) -> None:
        """No-op: workers trace in their first call."""

    @property
    def has_run(self) -> bool:
        """False until the first call, which also traces and compiles."""
        return self._graph is not None

    def graph_def(self) -> Any:
        """Returns the graph of the step; None before the first call."""
        return None if self._graph is None else self._graph.as_graph_def()

    def _schedule(self, arguments: Any) -> Any:
        try:
            return self._coordinator.schedule(self._function, arguments)
        except Exception as e:  # the first call traces, and AutoGraph wraps errors of unknown classes
            explanation = step_mistakes.explain_step_error(e, "one of train_data, for one worker")
            raise (ctl_error_in(e) or explanation or e) from None

    def _run_steps(self, iterator: Any, max_steps: Any, end: Any) -> Any:
        """Runs up to `max_steps` steps with numbers below `end`. Returns their totals `[m, 2]`."""
        self._graph, self._traced_for = tf.compat.v1.get_default_graph(), self._trained()
        self._replica = self._step.function(exclusive_updates=update_lock.held)

        def step(count: Any, packed: Any) -> tuple[Any, Any]:
            number = tf.raw_ops.ResourceCountUpTo(resource=self._next_step.handle, limit=_LIMIT, T=tf.int64)

            def run_step() -> tuple[Any, Any]:
                return count + 1, packed + self._run_replica(next(iterator))

            return tf.cond(number < end, run_step, lambda: (max_steps, packed))

        start = tf.constant(0, tf.int64), tf.zeros([1, 2], tf.float64)
        shapes = tf.TensorShape([]), tf.TensorShape([None, 2])
        return tf.while_loop(lambda count, _: count < max_steps, step, start, shapes)[1]

    def _run_replica(self, batch: Any) -> Any:
        before = len(tf.compat.v1.get_default_graph().get_operations())
        packed = self._strategy.run(self._replica, (batch,))
        update_lock.count_after(self._counter, packed, before)
        return packed


_LIMIT = 2**63 - 1


def _int64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)
