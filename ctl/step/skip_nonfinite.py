"""A step that is left out: its numbers do not count, and what it changed besides weights is put back."""

from collections.abc import Callable, Sequence

import tensorflow as tf
from ctl.step import finiteness
from ctl.step.averaging import Totals


class Skipping:
    """What `skip` and `rollback` need in the trace of a step; nothing is traced for `stop`.

    Args:
      policy: () -> a word of finiteness.NONFINITE_POLICIES.
      statistics: () -> the variables that a step changes besides what `minimize` updates.
      counter: completed steps, for the message; None in an evaluation.
    """

    def __init__(
        self,
        policy: Callable[[], str] = lambda: "stop",
        statistics: Callable[[], Sequence] = tuple,
        counter: tf.Variable | None = None,
    ):
        self._policy = policy
        self._statistics = statistics
        self._counter = counter

    @tf.autograph.experimental.do_not_convert
    def before(self) -> list:
        """What may have to be put back, taken before the step."""
        if self._policy() == "stop" or self._counter is None:
            return []
        return [(v, tf.identity(v)) for v in self._statistics()]

    @tf.autograph.experimental.do_not_convert
    def after(
        self,
        packed: tf.Tensor,
        totals: Totals,
        updates: Sequence,
        before: list,
        *,
        prints: bool = True,
        local: bool = False,
    ) -> tf.Tensor:
        """Undoes the step where something was not finite; only its number of examples still counts.

        Args:
          updates: (whether all was finite, by whom it was not) of each update of the step.
          prints: from the graph, which XLA cannot; else the caller tells.
          local: the step is this worker's own.
        """
        if not updates:
            return packed
        goods = [good for good, _ in updates]
        good = tf.reduce_all(tf.stack(goods)) if len(goods) > 1 else goods[0]
        for variable, value in before:
            variable.assign(tf.where(good, variable, value))
        if self._counter is not None and prints:
            finiteness.warn_of_skipped(good, updates[0][1], self._counter, local)
        return totals.left_out(packed, good)
