"""Execution of the user's step on one replica.

`ReplicaStep` traces the step and handles accumulation, compilation and empty batches with a `Recorder`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from ctl.distribute.autograph import converted
from ctl.distribute.keras_objects import plain
from ctl.distribute.row_partition import Share, num_rows, take_rows
from ctl.errors import UsageError
from ctl.step import finiteness, replica_assignments, synchronized_moments
from ctl.step import gradients as gradient_path
from ctl.step.averaging import Totals
from ctl.step.eight_bit import EightBitSums
from ctl.step.keras_losses import allow_division, refuse_division
from ctl.step.local_steps import LocalSteps
from ctl.step.logged import Logged, logged, split
from ctl.step.mask_counts import MaskCounts
from ctl.step.skip_nonfinite import Skipping
from ctl.step.step_times import StepTimes


class Recorder(threading.local):
    """What `minimize` does during one replica's trace; replicas trace in threads of their own."""

    def __init__(self) -> None:
        self.updates: list[gradient_path.Update] = []  # waiting for the end of the step
        self.norms: dict[str, Any] = {}  # of the updates that were applied
        self.logged: dict[str, Logged] = {}  # by the step, so far
        self.tracing = False  # a step is being traced
        self.graph: Any = None  # in which the step is traced
        self.averaged = False  # `average` was called in this step
        self.parts = 1  # parts a replica's batch is split into
        self.waits = False  # updates are kept until the step is over
        self.compiled = False  # inside XLA, where no collective may be
        self.goods: list = []  # of the updates: whether the step counts, by whom not
        self.stops: list = []  # of the updates within XLA: whether the run goes on, by whom not
        self.in_program = False  # the loop around the step is compiled as well
        self.empty = None  # true where this replica has no example; None: never
        self.counts: MaskCounts | None = None  # of masks, if the batch is one part of several
        self.even = False  # static shapes are the same on all replicas
        self.times: StepTimes | None = None  # where this replica's waits are added up
        self.local: LocalSteps | None = None  # the step is this worker's own
        self.eight_bit: EightBitSums | None = None  # sums gradients

    @property
    def local_workers(self) -> int:
        """How many workers make steps of their own; 0: gradients are summed over replicas."""
        return 0 if self.local is None else self.local.workers

    def begin(
        self, parts: int = 1, *, waits: bool = False, compiled: bool = False, empty: Any = None
    ) -> None:
        """A step begins, on one of `parts` parts of the batch."""
        self.updates, self.norms, self.parts, self.averaged = [], {}, parts, False
        self.goods, self.stops, self.logged, self.tracing = [], [], {}, True
        self.waits, self.compiled, self.empty, self.counts = waits, compiled, empty, None
        self.graph = tf.compat.v1.get_default_graph()

    def check_graph(self, method: str, fix: str) -> None:
        """Raises UsageError for a call within a condition, a loop or a function that the step traces."""
        if self.tracing and tf.compat.v1.get_default_graph() is not self.graph:
            raise UsageError(
                f"{method} is called within a condition or loop on tensors (`if`, `while`, `for`), or in a "
                f"tf.function of the step's own; expected a call in every step. {fix}"
            )

    def minimize(self, update: gradient_path.Update, how: gradient_path.Gradients) -> None:
        """Applies the update now, or keeps it until the step is over."""
        self.check_graph(
            "minimize()",
            "Write self.minimize(loss, tape, when=step % 2 == 0) in place of `if step % 2 == 0: ...`.",
        )
        update.even, update.in_program = self.even, self.in_program
        if self.local is not None:
            self.local.check(update)
        if self.waits:
            self.updates.append(update)
        else:
            with replica_assignments.allowed():
                norm = gradient_path.apply(update, how, self.times, self.eight_bit)
            self.norms[self._norm_name(update.label)] = norm
            if update.good is not None:
                self.goods.append((update.good, update.found))
            if update.stop is not None:
                self.stops.append(update.stop)

    def log(self, name: str, value: Any, reduce: str, num_replicas: int) -> None:
        """Keeps a number until the step returns. Raises UsageError for what it cannot keep."""
        if not self.tracing:
            raise UsageError(f"log({name!r}) within a tf.function that is no step; call it outside.")
        self.check_graph(
            f"log({name!r})", "Log the value in every step, e.g. tf.where(condition, value, 0.0)."
        )
        if not isinstance(name, str) or not name or name in self.logged:
            raise UsageError(
                f"log() got the name {name!r}; expected a text that the step has not logged yet."
            )
        self.logged[name] = logged(name, value, reduce, parts=num_replicas * self.parts, empty=self.empty)

    def _norm_name(self, label: str) -> str:
        """`gradient_norm`, or `gradient_norm/label`; with a number if it comes again in the step."""
        name = f"gradient_norm/{label}" if label else "gradient_norm"
        again = sum(known == name or known.startswith(f"{name}_") for known in self.norms)
        return f"{name}_{again + 1}" if again else name


class _Part(NamedTuple):
    """A batch for the step; whether it has no example (None: it has some); what metrics counted before."""

    batch: Any
    empty: Any
    counts: list


class ReplicaStep:
    """A user's step for one replica, as a function from a batch to a packed vector `[m, 2]`.

    With `accumulate_steps`, parts of the batch run one after the other, their gradients are added
    up, and the updates come after the last part. With `jit_compile`, forward and backward run as one
    XLA program and the updates come after it. A replica without examples works on a row that only
    stands in: lent, if the share comes with the number of its real rows, else of zeros.

    Args:
      how: () -> the `Gradients` of this step.
      jit_compile: () -> whether to compile.
      metrics: Keras metrics that the step may update.
      skipping: what happens to a step that is left out.

    Attributes:
      calls_minimize: True if a traced step has called `minimize`.
      times: where the waits of this worker are added up; None: nowhere.
      local: averages weights, where gradients are not summed; or None.
      eight_bit: sums gradients, if they travel so; or None.
    """

    def __init__(
        self,
        step: Callable,
        *,
        recorder: Recorder,
        how: Callable,
        num_replicas: int = 1,
        jit_compile: Callable[[], bool] = lambda: False,
        metrics: Sequence = (),
        skipping: Skipping = Skipping(),  # noqa: B008  keeps nothing
    ):
        self._step = step
        self._recorder = recorder
        self._how = how
        self._num_replicas = num_replicas
        self._jit_compile = jit_compile
        self._metrics = list(metrics)
        self._skipping = skipping
        self._share_of: Callable[[Any], Share] = Share
        self._even = False
        self._in_program = False
        self._parts = 1
        self.totals = Totals()
        self.calls_minimize = False
        self.times: StepTimes | None = None
        self.local: LocalSteps | None = None
        self.eight_bit: EightBitSums | None = None

    def function(
        self, share_of: Callable[[Any], Share] = Share, even: bool = False, in_program: bool = False
    ) -> Callable[[Any], Any]:
        """For `strategy.run` within a trace: an element of the data -> `[m, 2]`.

        `even`: static shapes are the same on all replicas. `in_program`: the loop around the step is
        compiled too; what comes is (`[m, 2]`, `finiteness.step_report`).

        Three ways, each of them straight to the user's step: what a user finds in a traceback is
        theirs.
        """
        self._share_of, self._even, self._parts = share_of, even, self._how().accumulate_steps
        self._in_program = in_program
        if self._parts > 1:
            return self._accumulated
        return self._compiled if self._jit_compile() else self._plain

    def _plain(self, element: Any) -> Any:
        share, saved = self._start(element)
        part = self._begin(share)
        with self._checked(part.empty):
            scores = converted(self._step)(part.batch)
        packed = self._packed(scores, part, self._recorder.norms)
        return self._ended(packed, saved)

    def _compiled(self, element: Any) -> Any:
        share, saved = self._start(element)
        part = self._begin(share)
        waiting: list[gradient_path.Update] = []

        def forward_and_backward(batch: Any) -> Any:
            self._recorder.begin(waits=True, compiled=True, empty=part.empty)
            with self._checked(part.empty):
                scores = converted(self._step)(batch)
            return self._gradients_of(scores, part, waiting)

        done = tf.function(forward_and_backward, jit_compile=True, autograph=False)(part.batch)
        return self._ended(self._updated_outside(done, part, waiting), saved)

    def _accumulated(self, element: Any) -> Any:
        share, saved = self._start(element)
        rows, parts = self._rows_to_split(share), self._parts
        first = self._begin(Share(take_rows(share.rows, 0, rows // parts)), parts)
        counts = self._recorder.counts = self._mask_counts(share, first.batch, rows)
        step = converted(self._step)
        with self._checked(first.empty):
            scores = step(first.batch)
        packed = self._packed(scores, first)
        updates = self._recorder.updates

        def another(i: Any, packed: Any, sums: Any) -> tuple[Any, Any, Any]:
            low, high = rows * i // parts, rows * (i + 1) // parts
            part = self._begin(Share(take_rows(share.rows, low, high)), parts)
            self._goes_on(counts)
            with self._checked(part.empty):
                scores = step(part.batch)
            packed += self._packed(scores, part)
            return i + 1, packed, _added(sums, _summable(self._recorder.updates))

        so_far = 1, packed, _summable(updates)
        if self._in_program:  # within XLA sizes are static
            for _ in range(1, parts):
                so_far = another(*so_far)
        else:
            shapes = tf.TensorShape([]), packed.shape, _shapes(so_far[-1])
            so_far = tf.while_loop(lambda i, *_: i < parts, another, so_far, shapes)
        _, packed, sums = so_far
        self._recorder.begin()
        return self._ended(self._updated(packed, updates, _gradients(sums, updates)), saved)

    @contextlib.contextmanager
    def _checked(self, empty: Any) -> Iterator[None]:
        """Around the user's step: checks assignments, and counts no row that only stands in."""
        with replica_assignments.refused(self._num_replicas), synchronized_moments.without_stand_ins(empty):
            yield

    def _start(self, element: Any) -> tuple[Share, list]:
        """The replica's share, and what may have to be put back."""
        refuse_division(self._num_replicas)
        recorder = self._recorder
        recorder.even, recorder.in_program, recorder.times = self._even, self._in_program, self.times
        recorder.local, recorder.eight_bit = self.local, self.eight_bit
        return self._share_of(element), self._skipping.before()

    def _begin(self, share: Share, parts: int = 1) -> _Part:
        """What the user's step gets; one of `parts` parts keeps its updates for the end."""
        batch, empty = self._never_empty(share, parts)
        self._recorder.begin(parts, waits=parts > 1, empty=empty)
        return _Part(batch, empty, self._counted(empty))

    def _mask_counts(self, share: Share, batch: Any, rows: Any) -> MaskCounts:
        def part(i: Any) -> tuple[Any, Any]:
            low, high = rows * i // self._parts, rows * (i + 1) // self._parts
            return self._never_empty(Share(take_rows(share.rows, low, high)), self._parts)

        return MaskCounts(batch, part, self._parts)

    def _goes_on(self, counts: MaskCounts) -> None:
        """Another part begins, whose masks were counted in the first one."""
        self._recorder.counts = counts
        counts.begin_next_part()

    def _packed(self, scores: Any, part: _Part, norms: Any = None) -> Any:
        self._count_again(part.empty, part.counts)
        return self._pack(scores, part.batch, norms)

    def _ended(self, packed: Any, saved: Any) -> Any:
        goods, stops = self._recorder.goods, self._recorder.stops
        self.calls_minimize |= bool(self._recorder.norms)
        local = self.local is not None
        packed = self._skipping.after(
            packed, self.totals, goods, saved, prints=not self._in_program, local=local
        )
        if self.local is not None:
            self.local.note_stops(stops)
        return (packed, finiteness.step_report(goods, stops)) if self._in_program else packed

    def _rows_to_split(self, share: Share) -> Any:
        return num_rows(share.rows) if share.real_rows is None else tf.cast(share.real_rows, tf.int32)

    def _gradients_of(self, scores: Any, part: _Part, waiting: list) -> Any:
        """What XLA returns: totals, gradients, and whether each update is to be applied."""
        packed = self._pack(scores, part.batch)
        waiting.extend(self._recorder.updates)
        return packed, [u.gradients for u in waiting], [True if u.when is None else u.when for u in waiting]

    def _updated_outside(self, done: Any, part: _Part, waiting: list) -> Any:
        packed, sums, whens = done
        for update, when in zip(waiting, whens, strict=True):
            update.when = None if update.when is None else when
        self._count_again(part.empty, part.counts)
        self._recorder.begin()
        return self._updated(packed, waiting, sums)

    def _updated(self, packed: Any, updates: Any, sums: Any) -> Any:
        for update, gradients in zip(updates, sums, strict=True):
            update.gradients, update.may_be_empty = gradients, True
            self._recorder.minimize(update, self._how())
        return self.totals.append(packed, self._recorder.norms)

    def _pack(self, scores: Any, batch: Any, norms: Any = None) -> Any:
        allow_division()
        if not isinstance(scores, dict):
            raise UsageError(
                f"the step returned {type(scores).__name__}; expected a dictionary from names to one "
                'number per example, e.g. return {"loss": per_example}.'
            )
        scores, sums = split(scores, self._recorder.logged)
        self._recorder.tracing = False
        return self.totals.pack(scores, num_rows(batch), sums | (norms or {}), self._recorder.empty)

    def _never_empty(self, share: Share, parts: int = 1) -> Any:
        """The batch, with a row of zeros in place of none; and whether it has no example, or None."""
        batch, real_rows = share
        if real_rows is not None:
            return batch, tf.equal(real_rows, 0)
        rows = num_rows(batch)
        dense = all(tf.is_tensor(t) for t in tf.nest.flatten(batch))
        if (isinstance(rows, int) and rows) or not dense or self._num_replicas * parts == 1:
            return batch, None
        empty = tf.equal(rows, 0)

        def row_of_zeros() -> Any:
            return tf.nest.map_structure(
                lambda t: tf.zeros(tf.concat([[1], tf.shape(t)[1:]], axis=0), t.dtype), batch
            )

        if isinstance(rows, int):
            return row_of_zeros(), empty
        filled = tf.cond(empty, row_of_zeros, lambda: tf.nest.map_structure(tf.identity, batch))
        for new, old in zip(tf.nest.flatten(filled), tf.nest.flatten(batch), strict=True):
            new.set_shape([None, *old.shape[1:]])
        return filled, empty

    def _counted(self, empty: Any) -> Any:
        """What the metrics have counted so far, if this replica may be empty."""
        if empty is None:
            return []
        variables = [plain(v) for m in self._metrics for v in m.variables]
        # in central storage all replicas count in one variable, where nothing can be taken back
        own = [v for v in variables if hasattr(v, "values")]
        return [(v, tf.identity(v)) for v in own]

    def _count_again(self, empty: Any, before: Any) -> None:
        """Takes back what metrics made of a row that only stands in."""
        if before:
            tf.cond(empty, lambda: [v.assign(x) for v, x in before] and None, lambda: None)


def _summable(updates: list) -> list:
    """The gradients of each update: a tensor, or the indices and values of a sparse one."""
    return [
        [[g.indices, g.values] if isinstance(g, tf.IndexedSlices) else g for g in u.gradients]
        for u in updates
    ]


def _shapes(sums: list) -> list:
    """What stays the same in the loop: all but the number of rows."""
    return [
        [
            [tf.TensorShape([None, *t.shape[1:]]) for t in g] if isinstance(g, list) else g.shape
            for g in total
        ]
        for total in sums
    ]


def _added(sums: list, more: list) -> list:
    """Dense gradients are added up, rows are put in a row."""

    def sum_of(a: Any, b: Any) -> Any:
        return (
            [tf.concat(pair, axis=0) for pair in zip(a, b, strict=True)] if isinstance(a, list) else a + b
        )

    return [
        [sum_of(a, b) for a, b in zip(total, part, strict=True)]
        for total, part in zip(sums, more, strict=True)
    ]


def _gradients(sums: list, updates: list) -> list:
    """What `_summable` made, as gradients of the same kinds as in `updates`."""
    return [
        [
            tf.IndexedSlices(s[1], s[0], g.dense_shape) if isinstance(s, list) else s
            for s, g in zip(total, update.gradients, strict=True)
        ]
        for total, update in zip(sums, updates, strict=True)
    ]
