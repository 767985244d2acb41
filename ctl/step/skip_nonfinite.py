"""Steps that are left out: their values do not count, and variables besides the weights are restored."""

from collections.abc import Callable, Sequence

import tensorflow as tf
from ctl.step import finiteness
from ctl.step.averaging import Totals


class Skipping:
    """Treatment of the policies `skip` and `rollback` in the trace of a step. A no-op for `stop`.

    Args:
      policy: Returns a name of `finiteness.NONFINITE_POLICIES`.
      statistics: Returns the variables that a step changes besides those that `minimize` updates.
      counter: Number of completed steps, for messages. None in an evaluation.
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
        """Returns pairs (variable, value) to restore, read before the step."""
        if self._policy() == "stop" or self._counter is None:
            return []
        return [(v, tf.identity(v)) for v in self._statistics()]

    @tf.autograph.experimental.do_not_convert
    def after(
        self,
        packed: tf.Tensor,
        totals: Totals,
        validity: Sequence,
        before: list,
        *,
        prints: bool = True,
        is_local: bool = False,
    ) -> tf.Tensor:
        """Undoes the step where a value was not finite. Only its number of examples still counts.

        Args:
          packed: `[m, 2]`, values of the step.
          totals: Names of the values.
          validity: Pairs (is_valid, flags) of the updates of the step.
          before: Result of the method `before`.
          prints: True if the graph prints a message. Within XLA it cannot.
          is_local: True if workers train independently.

        Returns:
          `[m + 1, 2]`, with a row for the number of skipped steps; `packed` if no update can be invalid.
        """
        if not validity:
            return packed
        conditions = [is_valid for is_valid, _ in validity]
        is_valid = tf.reduce_all(tf.stack(conditions)) if len(conditions) > 1 else conditions[0]
        for variable, value in before:
            variable.assign(tf.where(is_valid, variable, value))
        if self._counter is not None and prints:
            finiteness.warn_of_skipped(is_valid, validity[0][1], self._counter, is_local)
        return totals.left_out(packed, is_valid)
