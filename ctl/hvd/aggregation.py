"""Accumulation of the gradients of several backward passes before an exchange.

The sum is discarded if its exchange failed. If the ranks of an elastic job change, all ranks discard it.
Only then do all ranks exchange again after the same number of passes.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_all: "weakref.WeakSet[Aggregator]" = weakref.WeakSet()


def forget_all() -> None:
    """Resets all aggregators to zero, because the ranks have changed."""
    for aggregator in list(_all):
        aggregator.forget()


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
        _all.add(self)

    def forget(self) -> None:
        """Resets the sums to zero. Eager mode only."""
        if self._counter is not None and tf.executing_eagerly():
            self._counter.assign(0)
            for total in self._sums.values():
                total.assign(tf.zeros_like(total))

    @property
    def counter(self) -> Any:
        """Variable with the number of passes in the sum that has not been reduced, `[]` int32."""
        if self._counter is None:
            self._counter = _variable("passes", [], tf.int32)
        return self._counter

    def is_due(self) -> Any:
        """Returns True, `[]` bool, if the last call has reduced the sum. Evaluate it after that call."""
        return tf.equal(self.counter, 0)

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """Adds one pass. Returns the reduced sum in the last pass, else the sum. None stays None."""
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                raise ValueError(  # a type that tf.function preserves
                    "backward_passes_per_step adds up dense gradients, and got IndexedSlices; "
                    "expected sparse_as_dense=True with it."
                )
        present = [i for i, g in enumerate(gradients) if g is not None]
        sums = [self._sum(i, gradients[i], variables[i]) for i in present]
        is_left_over = self.counter >= self.passes  # its exchange has failed
        tf.cond(is_left_over, lambda: self._clear(sums), lambda: tf.constant(False))
        for total, i in zip(sums, present, strict=True):
            total.assign_add(gradients[i])
        self.counter.assign_add(1)

        def hand_on() -> Any:
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
            tf.equal(self.counter, self.passes), hand_on, lambda: [total.read_value() for total in sums]
        )
        found: list[Any] = [None] * len(gradients)
        for i, value in zip(present, result, strict=True):
            found[i] = value
        return found

    def _clear(self, sums: Sequence[Any]) -> Any:
        for total in sums:
            total.assign(tf.zeros_like(total))
        self.counter.assign(0)
        return tf.constant(True)

    def _sum(self, place: int, gradient: Any, variable: Any) -> Any:
        if place not in self._sums:
            self._sums[place] = _variable(f"sum_{place}", variable.shape, gradient.dtype)
        return self._sums[place]


def _variable(name: str, shape: Any, dtype: Any) -> Any:
    """Returns a variable of zeros outside of the traced function. In a TF1 graph it is a local variable."""
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
