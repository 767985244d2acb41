"""Execution of the user's step on one replica.

`ReplicaStep` traces the step, collects its outputs, and handles accumulation, XLA compilation and empty
replica batches.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from ctl.distribute.autograph import converted
from ctl.distribute.keras_objects import unwrap
from ctl.distribute.row_partition import Share, num_rows, take_rows
from ctl.errors import UsageError
from ctl.step import accumulation, finiteness, replica_assignments
from ctl.step.averaging import Totals
from ctl.step.context import StepContext
from ctl.step.gradient_settings import Gradients
from ctl.step.keras_losses import allow_division, refuse_division
from ctl.step.logged import split
from ctl.step.mask_counts import MaskCounts
from ctl.step.record import StepRecord
from ctl.step.reducers.reducer import GradientReducer
from ctl.step.skip_nonfinite import Skipping
from ctl.step.step_times import StepTimes
from ctl.step.traced_step import TracedStep, tracing
from ctl.step.update_request import UpdateRequest
from ctl.tensorflow_patches import synchronized_moments

RETRACE_MESSAGE = "The trainable variables have changed: the step is traced again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserStep:
    """A step that a user has written.

    Attributes:
      function: Batch of one replica -> dictionary of values.
      settings: Returns the gradient settings.
      is_compiled: Returns True if forward and backward are compiled with XLA.
      metrics: Keras metrics that the step may update.
    """

    function: Callable[[Any], Any]
    settings: Callable[[], Gradients] = Gradients
    is_compiled: Callable[[], bool] = lambda: False
    metrics: Sequence[Any] = ()


class ReplicaStep:
    """The step of one replica, as a function from a batch to a packed matrix `[m, 2]`.

    With `accumulate_steps`, parts of the batch run sequentially, their gradients are added up, and
    the updates follow the last part. With `jit_compile`, forward and backward are one XLA program, and the
    updates follow it. A replica without examples runs the step on a placeholder row, which does not count:
    a row of another replica if the share contains the number of its real rows, else zeros.

    Args:
      user_step: Step to run.
      reducer: Reducer of the gradients.
      num_replicas: Number of replicas of the job.
      full_rows: Number of rows of a full batch of one replica, or of a part of it.
      skipping: Treatment of steps that are left out.
      timer: Sums of the waiting times of this worker, or None.

    Attributes:
      totals: Names and packing of the values.
      reducer, timer: As given.
      calls_minimize: True if a traced step has called `minimize`.
    """

    def __init__(
        self,
        user_step: UserStep,
        *,
        reducer: GradientReducer,
        num_replicas: int = 1,
        full_rows: int = 1,
        skipping: Skipping = Skipping(),  # noqa: B008  immutable
        timer: StepTimes | None = None,
    ):
        self._user_step, self._num_replicas, self._skipping = user_step, num_replicas, skipping
        self.totals = Totals(full_rows)
        self.reducer, self.timer = reducer, timer
        self.calls_minimize = False

    def function(
        self,
        share_of: Callable[[Any], Share] = Share,
        even: bool = False,
        in_program: bool = False,
        exclusive_updates: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Callable[[Any], Any]:
        """Returns a function for `strategy.run`: an element of the data -> `[m, 2]`.

        Args:
          share_of: Converts an element of the data to the share of a replica.
          even: True if static shapes are equal on all replicas.
          in_program: True if the loop around the step is compiled too. The function then returns a pair
            (`[m, 2]`, `finiteness.step_report`).
          exclusive_updates: Returns a context that excludes the updates of other workers.
        """
        context = StepContext(
            settings=self._user_step.settings(),
            is_in_compiled_loop=in_program,
            has_even_shapes=even,
            num_local_workers=self.reducer.num_local_workers,
            timer=self.timer,
            exclusive_updates=exclusive_updates,
        )
        trace = _ReplicaTrace(self, self._user_step, context, share_of, self._num_replicas, self._skipping)
        if context.settings.accumulate_steps > 1:
            return trace.accumulated
        return trace.compiled if self._user_step.is_compiled() else trace.uncompiled

    def record_trace(self, record: StepRecord) -> None:
        """Records whether a traced step calls `minimize`."""
        self.calls_minimize |= bool(record.norms)


class _Part(NamedTuple):
    """A batch for the step.

    Attributes:
      batch: Batch, never empty.
      is_empty: `[]` bool, True if the batch is a placeholder. None if it never is.
      metric_values: Pairs (variable, value) of metrics before the step.
    """

    batch: Any
    is_empty: Any
    metric_values: list


@dataclasses.dataclass(frozen=True)
class _ReplicaTrace:
    """Trace of a step for one kind of batches. Each of the three ways calls the user's step directly."""

    _step: ReplicaStep
    _user_step: UserStep
    _context: StepContext
    _share_of: Callable[[Any], Share]
    _num_replicas: int
    _skipping: Skipping

    def uncompiled(self, element: Any) -> Any:
        share, saved = self._start(element)
        part = self._part(share)
        with self._tracing(part) as traced:
            scores = converted(self._user_step.function)(part.batch)
        self._restore_metrics(part)
        packed = self._pack(scores, part, traced, traced.record.norms)
        return self._finish(packed, traced.record, saved)

    def compiled(self, element: Any) -> Any:
        share, saved = self._start(element)
        part = self._part(share)
        deferred: list[UpdateRequest] = []

        def forward_and_backward(batch: Any) -> Any:
            with self._tracing(part, is_compiled=True) as traced:
                scores = converted(self._user_step.function)(batch)
            packed = self._pack(scores, part, traced)
            deferred.extend(traced.record.deferred)
            conditions = [True if r.condition is None else r.condition for r in deferred]
            return packed, [(r.gradients, r.loss_flag) for r in deferred], conditions

        function = tf.function(forward_and_backward, jit_compile=True, autograph=False)
        packed, results, conditions = function(part.batch)
        requests = [
            dataclasses.replace(
                request,
                gradients=gradients,
                loss_flag=loss_flag,
                condition=None if request.condition is None else condition,
                may_lack_rows=True,
            )
            for request, (gradients, loss_flag), condition in zip(
                deferred, results, conditions, strict=True
            )
        ]
        self._restore_metrics(part)
        return self._update(packed, requests, saved)

    def accumulated(self, element: Any) -> Any:
        share, saved = self._start(element)
        num_parts = self._context.settings.accumulate_steps
        has_own_count = share.real_rows is not None
        rows = tf.cast(share.real_rows, tf.int32) if has_own_count else num_rows(share.rows)

        def part_at(i: Any) -> Share:
            return Share(take_rows(share.rows, rows * i // num_parts, rows * (i + 1) // num_parts))

        step = converted(self._user_step.function)
        first = self._part(Share(take_rows(share.rows, 0, rows // num_parts)), num_parts)
        counts = MaskCounts(first.batch, lambda i: self._never_empty(part_at(i), num_parts), num_parts)
        with self._tracing(first, num_parts=num_parts, mask_counts=counts) as traced:
            scores = step(first.batch)
        self._restore_metrics(first)
        packed = self._pack(scores, first, traced)
        requests = traced.record.deferred

        def another(i: Any, packed: Any, sums: Any) -> tuple[Any, Any, Any]:
            part = self._part(part_at(i), num_parts)
            counts.begin_next_part()
            with self._tracing(part, num_parts=num_parts, mask_counts=counts) as traced:
                scores = step(part.batch)
            self._restore_metrics(part)
            packed += self._pack(scores, part, traced)
            return i + 1, packed, accumulation.add(sums, traced.record.deferred)

        state = 1, packed, accumulation.initial_sums(requests)
        if self._context.is_in_compiled_loop:  # within XLA sizes are static
            for _ in range(1, num_parts):
                state = another(*state)
        else:
            shapes = tf.TensorShape([]), packed.shape, accumulation.shape_invariants(state[-1])
            state = tf.while_loop(lambda i, *_: i < num_parts, another, state, shapes)
        _, packed, sums = state
        return self._update(packed, accumulation.accumulated(requests, sums), saved)

    @contextlib.contextmanager
    def _tracing(self, part: _Part, **values: Any) -> Iterator[TracedStep]:
        """Around the user's step: checks assignments, and leaves placeholder rows out of statistics."""
        context = dataclasses.replace(self._context, is_empty=part.is_empty, **values)
        with (
            tracing(context, self._step.reducer) as traced,
            replica_assignments.refused(self._num_replicas),
            synchronized_moments.without_placeholders(part.is_empty),
        ):
            yield traced

    def _start(self, element: Any) -> tuple[Share, list]:
        """Returns the share of the replica, and the values to restore if the step is left out."""
        refuse_division(self._num_replicas)
        return self._share_of(element), self._skipping.before()

    def _part(self, share: Share, num_parts: int = 1) -> _Part:
        batch, is_empty = self._never_empty(share, num_parts)
        return _Part(batch, is_empty, self._metric_values(is_empty))

    def _pack(self, scores: Any, part: _Part, traced: TracedStep, norms: Any = None) -> Any:
        allow_division()
        if not isinstance(scores, dict):
            raise UsageError(
                f"the step returned {type(scores).__name__}; expected a dictionary from names to one "
                'number per example, e.g. return {"loss": per_example}.'
            )
        scores, sums = split(scores, traced.record.logged)
        return self._step.totals.pack(scores, num_rows(part.batch), sums | (norms or {}), part.is_empty)

    def _update(self, packed: Any, requests: Sequence[UpdateRequest], saved: list) -> Any:
        """Applies the deferred updates."""
        traced = TracedStep(self._context, StepRecord(), self._step.reducer)
        for request in requests:
            traced.apply(request)
        packed = self._step.totals.append(packed, traced.record.norms)
        return self._finish(packed, traced.record, saved)

    def _finish(self, packed: Any, record: StepRecord, saved: list) -> Any:
        stop_conditions = record.stop_conditions()
        self._step.record_trace(record)
        packed = self._skipping.after(
            packed,
            self._step.totals,
            record.validity(),
            saved,
            prints=not self._context.is_in_compiled_loop,
            is_local=self._context.num_local_workers > 0,
        )
        self._step.reducer.after_updates(stop_conditions)
        if self._context.is_in_compiled_loop:
            return packed, finiteness.step_report(record.validity(), stop_conditions)
        return packed

    def _never_empty(self, share: Share, num_parts: int = 1) -> Any:
        """Returns the batch, with a row of zeros if it is empty, and `[]` bool or None: is it empty?"""
        batch, real_rows = share
        if real_rows is not None:
            return batch, tf.equal(real_rows, 0)
        rows = num_rows(batch)
        is_dense = all(tf.is_tensor(t) for t in tf.nest.flatten(batch))
        if (isinstance(rows, int) and rows) or not is_dense or self._num_replicas * num_parts == 1:
            return batch, None
        is_empty = tf.equal(rows, 0)

        def row_of_zeros() -> Any:
            return tf.nest.map_structure(
                lambda t: tf.zeros(tf.concat([[1], tf.shape(t)[1:]], axis=0), t.dtype), batch
            )

        if isinstance(rows, int):
            return row_of_zeros(), is_empty
        filled = tf.cond(is_empty, row_of_zeros, lambda: tf.nest.map_structure(tf.identity, batch))
        for new, old in zip(tf.nest.flatten(filled), tf.nest.flatten(batch), strict=True):
            new.set_shape([None, *old.shape[1:]])
        return filled, is_empty

    def _metric_values(self, is_empty: Any) -> list:
        """Returns the variables of metrics with their values before the step, if the batch may be empty."""
        if is_empty is None:
            return []
        variables = [unwrap(v) for m in self._user_step.metrics for v in m.variables]
        # in central storage all replicas update one variable, which cannot be restored
        return [(v, tf.identity(v)) for v in variables if hasattr(v, "values")]

    def _restore_metrics(self, part: _Part) -> None:
        """Undoes what metrics have counted of a placeholder row."""
        values = part.metric_values
        if values:
            tf.cond(part.is_empty, lambda: [v.assign(x) for v, x in values] and None, lambda: None)
