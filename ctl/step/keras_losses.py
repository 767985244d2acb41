"""Keras 3 loss objects on several replicas: a mean over the global batch, or an error.

A Keras loss object returns the mean over the examples of one replica, divided by the number of replicas.
That is wrong for short batches and masks, and half of the loss on two replicas. In a user's step such a
call raises UsageError (`refuse_division`). Keras itself calls the losses of
compiled models; `GlobalMeans` converts their results to shares of the mean over the global batch.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import tensorflow as tf
from ctl.distribute import replica_sum
from ctl.errors import UsageError
from ctl.tensorflow_patches import loss_reduction

# number of replicas while a step is traced that must not call a loss object
_num_replicas: ContextVar[int] = ContextVar("num_replicas_of_losses", default=1)
_means: ContextVar["GlobalMeans | None"] = ContextVar("means_of_losses", default=None)
_is_undivided: ContextVar[bool] = ContextVar("is_undivided", default=False)  # within `undivided_means`


def refuse_division(num_replicas: int) -> None:
    """Makes loss objects that average raise UsageError in this thread, if there are several replicas."""
    _install()
    _num_replicas.set(num_replicas)


def allow_division() -> None:
    """Ends `refuse_division`."""
    _num_replicas.set(1)


@contextlib.contextmanager
def undivided_means() -> Iterator[None]:
    """Within the block, a loss object returns the mean over the examples of this replica."""
    _install()
    token = _is_undivided.set(True)
    try:
        yield
    finally:
        _is_undivided.reset(token)


class GlobalMeans:
    """Context manager, in replica context, that makes losses shares of means over the global batch.

    Args:
      rows: Number of rows of this replica's batch, an int if it is static, else a scalar tensor.
      num_replicas: Number of replicas of all workers.
      is_empty: `[]` bool, True where the rows are placeholders, or None.
      is_local: True if workers train independently. Each counts as if all workers had the same rows.
    """

    def __init__(self, rows: Any, num_replicas: int, is_empty: Any = None, is_local: bool = False) -> None:
        self._is_local = is_local
        self._num_replicas = num_replicas
        self._is_empty = is_empty
        self._rows = rows if isinstance(rows, int) else tf.cast(rows, tf.float32)
        self._all_rows: Any = None

    def __enter__(self) -> "GlobalMeans":
        _install()
        self._token = _means.set(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _means.reset(self._token)

    def share_of_rows(self, value: Any) -> Any:
        """Converts a mean over the rows of this replica to its share of the mean over all rows."""
        return self._times(value, self._counted(self._rows), self._rows_everywhere())

    def mean_of_share(self, share: Any) -> Any:
        """Converts a share to a value. Its mean over all rows is the sum of the shares."""
        return self._times(share, self._rows_everywhere(), self._rows)

    def _rows_everywhere(self) -> Any:
        if self._all_rows is None:
            (self._all_rows,) = self.everywhere(self._counted(self._rows))
        return self._all_rows

    @staticmethod
    def _times(value: Any, numerator: Any, denominator: Any) -> Any:
        ratio = tf.math.divide_no_nan(*_floats(numerator, denominator))
        return value * tf.cast(ratio, value.dtype)

    def everywhere(self, *counts: Any) -> list:
        """Returns sums of counts over replicas. Static counts need no communication."""
        if self._num_replicas == 1:
            return list(counts)
        if self._is_local or all(isinstance(c, (int, float)) for c in counts):
            return [c * self._num_replicas for c in counts]
        local_counts = tf.stack([tf.cast(c, tf.float32) for c in counts])
        total = tf.stop_gradient(replica_sum.sum_over_all_replicas(local_counts))
        return tf.unstack(total, num=len(counts))

    def reduce(self, values: Any, sample_weight: Any, mask: Any, reduction: Any, same_rank: Any) -> Any:
        """Returns this replica's share of the result of Keras's `reduce_weighted_values`."""
        if values.shape.rank == 0:
            return self._share_of_scalar(values, sample_weight)
        weight = None
        if mask is not None:
            weight = mask = tf.cast(mask, values.dtype)
        if sample_weight is not None:
            weight = tf.cast(sample_weight, values.dtype)
            if mask is not None:
                expanded, weight = same_rank(mask, weight)
                weight = weight * expanded
        if weight is not None:
            values, weight = same_rank(values, weight)
        weighted = values if weight is None else values * weight
        if self._is_empty is not None:
            weighted = tf.where(self._is_empty, tf.zeros_like(weighted), weighted)
        total = tf.reduce_sum(weighted)
        if reduction == "sum":
            return total
        if reduction == "mean_with_sample_weight" and weight is not None:
            (divisor,) = self.everywhere(self._counted(tf.reduce_sum(weight)))
        elif mask is not None:
            size, entries, valid = self.everywhere(
                *(self._counted(c) for c in (_size(weighted), _size(mask), tf.reduce_sum(mask)))
            )
            size, entries, valid = _floats(size, entries, valid)
            divisor = size * tf.math.divide_no_nan(valid, entries)
        else:
            (divisor,) = self.everywhere(self._counted(_size(weighted)))
        return tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype))

    def _share_of_scalar(self, value: Any, sample_weight: Any) -> Any:
        """Returns the share of a loss that is a mean already. Keras multiplies it by the mean weight."""
        if self._num_replicas > 1:
            _warn_of_scalar()
        share = self.share_of_rows(value)
        if sample_weight is None:
            return share
        weight = tf.cast(sample_weight, tf.float32)
        total, count = self.everywhere(self._counted(tf.reduce_sum(weight)), self._counted(_size(weight)))
        return self._times(share, total, count)

    def _counted(self, count: Any) -> Any:
        if self._is_empty is None:
            return count
        return tf.where(self._is_empty, 0.0, tf.cast(count, tf.float32))


@functools.cache
def _warn_of_scalar() -> None:
    logging.getLogger("ctl").warning(
        "A loss returned a scalar. On several replicas it counts as a mean over the examples, so a sum "
        "would be too small. Return one number per example."
    )


def _size(tensor: Any) -> Any:
    static = tensor.shape.num_elements()
    return tf.size(tensor, out_type=tf.int32) if static is None else static


def _floats(*values: Any) -> Any:
    return [tf.cast(v, tf.float32) for v in values]


class _Reduction:
    """Reduction of the values of loss objects, which changes only within a step of `ctl`."""

    def reduce(
        self,
        original: Any,
        same_rank: Any,
        values: Any,
        sample_weight: Any,
        mask: Any,
        reduction: Any,
        dtype: Any,
    ) -> Any:
        reduces = reduction not in (None, "none")
        means = _means.get()
        if means is None or _is_undivided.get() or not reduces:
            divides = reduces and reduction != "sum" and values.shape.rank != 0
            if _num_replicas.get() > 1 and divides and not _is_undivided.get():
                _refuse()
            return original(values, sample_weight, mask, reduction, dtype)
        values = tf.cast(values, dtype or values.dtype)
        return means.reduce(values, sample_weight, mask, reduction, same_rank)

    def scale(self, original: Any, value: Any) -> Any:
        return value if _is_undivided.get() else original(value)

    def unscale(self, original: Any, value: Any) -> Any:
        if _is_undivided.get():
            return value
        means = _means.get()
        return original(value) if means is None else means.mean_of_share(value)


def _install() -> None:
    """Wraps functions of Keras once. The wrappers are no-ops outside a step."""
    loss_reduction.replace_loss_reduction(_Reduction())


def _refuse() -> None:
    raise UsageError(
        "The step called a Keras loss object that averages by itself: it would give the mean of one "
        f"replica's examples, divided by {_num_replicas.get()} replicas. Make the loss with "
        "reduction=None, e.g. keras.losses.SparseCategoricalCrossentropy(reduction=None), and give "
        "what it returns, one number per example, to self.average()."
    )
