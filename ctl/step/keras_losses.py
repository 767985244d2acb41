"""Keras 3 loss objects under several replicas: a mean over the global batch, or an error.

By itself a loss object gives the mean over one replica's examples, divided by the number of
replicas, and says nothing of it: wrong for short batches and masks, and half of the loss on two.
In a user's step such a call is refused (`refuse_division`). For compiled models, whose losses are
called by Keras, `GlobalMeans` makes of it the replica's share of the mean over the global batch.
"""

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from ctl.distribute import replica_sum
from ctl.errors import UsageError

_MODULE = "keras.src.losses.loss"


class _InThisThread(threading.local):
    replicas = 1  # how many, while a step is traced that must not call a loss object
    means: "GlobalMeans | None" = None
    undivided = False  # within `undivided_means`


_state = _InThisThread()


def refuse_division(num_replicas: int) -> None:
    """From here on in this thread; with one replica there is nothing to divide by."""
    _install()
    _state.replicas = num_replicas


def allow_division() -> None:
    """Ends `refuse_division`."""
    _state.replicas = 1


@contextlib.contextmanager
def undivided_means() -> Iterator[None]:
    """Within the block a loss object returns the mean over this replica's examples, as on one device."""
    _install()
    before, _state.undivided = _state.undivided, True
    try:
        yield
    finally:
        _state.undivided = before


class GlobalMeans:
    """Inside its `with` block, in replica context, losses are shares of means over the global batch.

    Args:
      rows: of this replica's batch, an int where static, else a scalar tensor.
      num_replicas: over all workers.
      empty: true where the rows only stand in; None: never.
      local: the step is this worker's own, and all others count as if they had the same rows.
    """

    def __init__(self, rows: Any, num_replicas: int, empty: Any = None, local: bool = False) -> None:
        self._local = local
        self._num_replicas = num_replicas
        self._empty = empty
        self._rows = rows if isinstance(rows, int) else tf.cast(rows, tf.float32)
        self._all_rows: Any = None

    def __enter__(self) -> "GlobalMeans":
        _install()
        self._before, _state.means = _state.means, self
        return self

    def __exit__(self, *_: Any) -> None:
        _state.means = self._before

    def share_of_rows(self, value: Any) -> Any:
        """A mean over this replica's rows -> its share of the mean over all rows."""
        return self._times(value, self._counted(self._rows), self._rows_everywhere())

    def mean_of_share(self, share: Any) -> Any:
        """What, averaged over replicas by their rows, gives the sum of the shares."""
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
        """Sums of counts over replicas; free of charge where they are static."""
        if self._num_replicas == 1:
            return list(counts)
        if self._local or all(isinstance(c, (int, float)) for c in counts):
            return [c * self._num_replicas for c in counts]
        here = tf.stack([tf.cast(c, tf.float32) for c in counts])
        total = tf.stop_gradient(replica_sum.sum_over_all_replicas(here))
        return tf.unstack(total, num=len(counts))

    def reduce(self, values: Any, sample_weight: Any, mask: Any, reduction: Any, same_rank: Any) -> Any:
        """What `reduce_weighted_values` of Keras gives for the global batch: this replica's share."""
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
        if self._empty is not None:
            weighted = tf.where(self._empty, tf.zeros_like(weighted), weighted)
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
        """Of a loss that averages by itself; Keras multiplies it by each weight and averages those."""
        if self._num_replicas > 1:
            _say_of_scalar()
        share = self.share_of_rows(value)
        if sample_weight is None:
            return share
        weight = tf.cast(sample_weight, tf.float32)
        total, count = self.everywhere(self._counted(tf.reduce_sum(weight)), self._counted(_size(weight)))
        return self._times(share, total, count)

    def _counted(self, count: Any) -> Any:
        return count if self._empty is None else tf.where(self._empty, 0.0, tf.cast(count, tf.float32))


@functools.cache
def _say_of_scalar() -> None:
    logging.getLogger("ctl").warning(
        "A loss returned a scalar. On several replicas it is taken for a mean over the examples; one "
        "that adds up comes out too small. Return one number per example."
    )


def _size(tensor: Any) -> Any:
    static = tensor.shape.num_elements()
    return tf.size(tensor, out_type=tf.int32) if static is None else static


def _floats(*values: Any) -> Any:
    return [tf.cast(v, tf.float32) for v in values]


def _install() -> None:
    """Puts our functions before those of Keras, once; they do nothing outside a step of ours."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or hasattr(module.reduce_weighted_values, "__wrapped__"):
        return
    reduce = module.reduce_weighted_values

    @functools.wraps(reduce)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        whole = reduction not in (None, "none")
        if _state.means is None or _state.undivided or not whole:
            divides = whole and reduction != "sum" and values.shape.rank != 0
            if _state.replicas > 1 and divides and not _state.undivided:
                _refuse()
            return reduce(values, sample_weight, mask, reduction, dtype)
        values = tf.cast(values, dtype or values.dtype)
        return _state.means.reduce(
            values, sample_weight, mask, reduction, module.squeeze_or_expand_to_same_rank
        )

    module.reduce_weighted_values = reduce_weighted_values
    unscale = getattr(module, "unscale_loss_for_distribution", None)
    if unscale is not None:
        module.unscale_loss_for_distribution = functools.partial(_unscaled, unscale)
        scale = module.scale_loss_for_distribution
        module.scale_loss_for_distribution = lambda value: value if _state.undivided else scale(value)


def _unscaled(unscale: Any, value: Any) -> Any:
    if _state.undivided:
        return value
    return unscale(value) if _state.means is None else _state.means.mean_of_share(value)


def _refuse() -> None:
    raise UsageError(
        "The step called a Keras loss object that averages by itself: it would give the mean of one "
        f"replica's examples, divided by {_state.replicas} replicas. Make the loss with "
        "reduction=None, e.g. keras.losses.SparseCategoricalCrossentropy(reduction=None), and give "
        "what it returns, one number per example, to self.average()."
    )
