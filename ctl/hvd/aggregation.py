"""Accumulation of the gradients of several backward passes before an exchange.

The sum is discarded if its exchange fails. If the ranks of an elastic job change, all ranks discard their
sums, so that they exchange again after the same number of passes.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_aggregators: "weakref.WeakSet[Aggregator]" = weakref.WeakSet()


def reset_all() -> None:
    """Resets all aggregators to zero, because the ranks have changed."""
    for aggregator in list(_aggregators):
        aggregator.reset()


class Aggregator:
    """Sum of `passes` backward passes. It is reduced in the last pass and then reset to zero.

    Args:
      passes: Backward passes per exchange, 1 or more.
      averages: If True, the sum is divided by `passes`.
    """

    def __init__(self, passes: int, averages: bool):
        self.passes = passes
        self._averages = averages
        self._counter: Any = None
        self._sums: dict[Any, Any] = {}
        _aggregators.add(self)

    def reset(self) -> None:
        """Resets the sums to zero. Eager mode only."""
        if self._counter is not None and tf.executing_eagerly():
            self._counter.assign(0)
            for total in self._sums.values():
                total.assign(tf.zeros_like(total))

    @property
    def counter(self) -> Any:
        """Variable with the number of passes since the last reduction, `[]` int32."""
        if self._counter is None:
            self._counter = _create_variable("passes", [], tf.int32)
        return self._counter

    def is_due(self) -> Any:
        """Returns True, `[]` bool, if the last call has reduced the sums. Evaluate it after that call."""
        return tf.equal(self.counter, 0)

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """Adds the gradients of one pass, and reduces and resets the sums in the last pass.

        Args:
          gradients: Dense gradients of this pass; None without a gradient.
          variables: Their variables, in the same order in each call.
          reduce: Function that reduces the sums over the ranks.

        Returns:
          The reduced sums in the last pass, otherwise the sums of this rank. None without a gradient.

        Raises:
          ValueError: For tf.IndexedSlices.
        """
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                raise ValueError(  # a type that tf.function preserves
                    "backward_passes_per_step got gradients of the type IndexedSlices; expected dense "
                    "gradients. Set sparse_as_dense=True."
                )
        present = [i for i, g in enumerate(gradients) if g is not None]
        sums = [self._get_sum(i, gradients[i], variables[i]) for i in present]
        is_left_over = self.counter >= self.passes  # its exchange has failed
        tf.cond(is_left_over, lambda: self._clear(sums), lambda: tf.constant(False))
        for total, i in zip(sums, present, strict=True):
            total.assign_add(gradients[i])
        self.counter.assign_add(1)

        def reduce_and_reset() -> Any:
            factor = 1.0 / self.passes if self._averages else 1.0
            totals: list[Any] = [None] * len(gradients)
            for total, i in zip(sums, present, strict=True):
                value = total.read_value()
                totals[i] = value * tf.cast(factor, value.dtype) if self._averages else value
            reduced = reduce(totals)
            for total in sums:
                total.assign(tf.zeros_like(total))
            self.counter.assign(0)
            return [reduced[i] for i in present]

        result = tf.cond(
            tf.equal(self.counter, self.passes),
            reduce_and_reset,
            lambda: [total.read_value() for total in sums],
        )
        reduced_or_sums: list[Any] = [None] * len(gradients)
        for i, value in zip(present, result, strict=True):
            reduced_or_sums[i] = value
        return reduced_or_sums

    def _clear(self, sums: Sequence[Any]) -> Any:
        for total in sums:
            total.assign(tf.zeros_like(total))
        self.counter.assign(0)
        return tf.constant(True)

    def _get_sum(self, index: int, gradient: Any, variable: Any) -> Any:
        if index not in self._sums:
            self._sums[index] = _create_variable(f"sum_{index}", variable.shape, gradient.dtype)
        return self._sums[index]


def _create_variable(name: str, shape: Any, dtype: Any) -> Any:
    """Creates a variable of zeros outside of the traced function. In a TF1 graph it is a local variable."""
    with tf.init_scope():
        zeros = tf.zeros(shape, dtype)
        if tf.executing_eagerly():
            return tf.Variable(zeros, trainable=False, name=name)
        return tf.compat.v1.Variable(
            zeros,
            trainable=False,
            name=f"hvd_{name}",
            use_resource=True,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        )
