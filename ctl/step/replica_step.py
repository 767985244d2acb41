"""What one replica does with its share of a batch: a person's step, traced.

`ReplicaStep` calls it, keeps what it writers, and sees to batches that are split, compiled or empty;
`Recorder` is how `minimize` and `average` know of that.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from ctl.distribute.keras_objects import plain
from ctl.distribute.row_partition import num_rows, take_rows
from ctl.errors import UsageError
from ctl.step import gradients as gradient_path
from ctl.step.averaging import Totals
from ctl.step.keras_losses import allow_division, refuse_division
from ctl.step.skip_nonfinite import Skipping


class Recorder(threading.local):
    """What `minimize` does during one replica's trace; replicas trace in threads of their own."""

    def __init__(self) -> None:
        self.updates: list[gradient_path.Update] = []  # waiting for the end of the step
        self.norms: list = []  # of the updates that were applied
        self.averaged = False  # `average` was called in this step
        self.parts = 1  # parts a replica's batch is split into
        self.waits = False  # updates are kept until the step is over
        self.compiled = False  # inside XLA, where no collective may be
        self.goods: list = []  # of the updates: whether the step counts
        self.empty = None  # true where this replica has no example; None: never

    def begin(
        self, parts: int = 1, *, waits: bool = False, compiled: bool = False, empty: Any = None
    ) -> None:
        """A step begins, on one of `parts` parts of the batch."""
        self.updates, self.norms, self.parts, self.averaged = [], [], parts, False
        self.goods = []
        self.waits, self.compiled, self.empty = waits, compiled, empty

    def minimize(self, update: gradient_path.Update, how: gradient_path.Gradients) -> None:
        """Applies the update now, or keeps it until the step is over."""
        if self.waits:
            self.updates.append(update)
        else:
            self.norms.append(gradient_path.apply(update, how))
            if update.good is not None:
                self.goods.append((update.good, update.found))


class ReplicaStep:
    """A person's step for one replica, as a function from a batch to a packed vector `[m, 2]`.

    With `accumulate_steps`, parts of the batch run one after the other, their gradients are added
    up, and the updates come after the last part. With `jit_compile`, forward and backward run as one
    XLA program and the updates come after it. A replica without examples works on a row that only
    stands in: lent, if the share comes with the number of its real rows, else of zeros.

    Args:
      how: () -> the `Gradients` of this step.
      jit_compile: () -> whether to compile.
      metrics: Keras metrics that the step may update.
      skipping: what happens to a step that is left out.
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
        self.totals = Totals()

    def __call__(self, batch: Any, real_rows: Any = None) -> Any:
        refuse_division(self._num_replicas)
        parts, saved = self._how().accumulate_steps, self._skipping.before()
        if parts > 1:
            return self._ended(self._accumulate(batch, parts, real_rows), saved)
        batch, empty = self._never_empty(batch, real_rows)
        if self._jit_compile():
            return self._ended(self._compiled(batch, empty), saved)
        self._recorder.begin(empty=empty)
        before = self._counted(empty)
        scores = self._step(batch)
        self._count_again(empty, before)
        return self._ended(self._pack(scores, batch, self._recorder.norms), saved)

    def _ended(self, packed: Any, saved: Any) -> Any:
        return self._skipping.after(packed, self.totals, self._recorder.goods, saved)

    def _compiled(self, batch: Any, empty: Any) -> Any:
        waiting = []

        def forward_and_backward(batch: Any) -> Any:
            self._recorder.begin(waits=True, compiled=True, empty=empty)
            packed = self._pack(self._step(batch), batch)
            waiting.extend(self._recorder.updates)
            return packed, _dense(waiting), [True if u.when is None else u.when for u in waiting]

        before = self._counted(empty)
        packed, sums, whens = tf.function(forward_and_backward, jit_compile=True)(batch)
        for update, when in zip(waiting, whens, strict=True):
            update.when = None if update.when is None else when
        self._count_again(empty, before)
        self._recorder.begin()
        return self._updated(packed, waiting, sums)

    def _accumulate(self, batch: Any, parts: Any, real_rows: Any) -> Any:
        rows = num_rows(batch) if real_rows is None else real_rows
        packed, updates = self._part(take_rows(batch, 0, rows // parts), parts)
        sums = _dense(updates)
        for i in tf.range(1, parts):
            low, high = rows * i // parts, rows * (i + 1) // parts
            more, others = self._part(take_rows(batch, low, high), parts)
            packed += more
            sums = _added(sums, _dense(others))
        self._recorder.begin()
        return self._updated(packed, updates, sums)

    def _part(self, batch: Any, parts: Any) -> Any:
        batch, empty = self._never_empty(batch, parts=parts)
        self._recorder.begin(parts, waits=True, empty=empty)
        before = self._counted(empty)
        packed = self._pack(self._step(batch), batch)
        self._count_again(empty, before)
        return packed, self._recorder.updates

    @tf.autograph.experimental.do_not_convert
    def _updated(self, packed: Any, updates: Any, sums: Any) -> Any:
        for update, gradients in zip(updates, sums, strict=True):
            update.gradients = gradients
            self._recorder.minimize(update, self._how())
        return self.totals.append(packed, self._recorder.norms)

    @tf.autograph.experimental.do_not_convert
    def _pack(self, scores: Any, batch: Any, norms: Any = ()) -> Any:
        allow_division()
        if not isinstance(scores, dict):
            raise UsageError(
                f"the step returned {type(scores).__name__}; expected a dictionary from names to one "
                'number per example, e.g. return {"loss": per_example}.'
            )
        return self.totals.pack(scores, num_rows(batch), norms, self._recorder.empty)

    @tf.autograph.experimental.do_not_convert
    def _never_empty(self, batch: Any, real_rows: Any = None, parts: int = 1) -> Any:
        """The batch, with a row of zeros in place of none; and whether it has no example, or None."""
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

        filled = tf.cond(empty, row_of_zeros, lambda: tf.nest.map_structure(tf.identity, batch))
        for new, old in zip(tf.nest.flatten(filled), tf.nest.flatten(batch), strict=True):
            new.set_shape([None, *old.shape[1:]])
        return filled, empty

    @tf.autograph.experimental.do_not_convert
    def _counted(self, empty: Any) -> Any:
        """What the metrics have counted so far, if this replica may be empty."""
        if empty is None:
            return []
        variables = [plain(v) for m in self._metrics for v in m.variables]
        # in central storage all replicas count in one variable, where nothing can be taken back
        own = [v for v in variables if hasattr(v, "values")]
        return [(v, tf.identity(v)) for v in own]

    @tf.autograph.experimental.do_not_convert
    def _count_again(self, empty: Any, before: Any) -> None:
        """Takes back what metrics made of a row that only stands in."""
        if before:
            tf.cond(empty, lambda: [v.assign(x) for v, x in before] and None, lambda: None)


@tf.autograph.experimental.do_not_convert
def _dense(updates: list) -> list:
    return [[tf.convert_to_tensor(g) for g in u.gradients] for u in updates]


@tf.autograph.experimental.do_not_convert
def _added(sums: list, more: list) -> list:
    return [
        [a + b for a, b in zip(total, part, strict=True)] for total, part in zip(sums, more, strict=True)
    ]
