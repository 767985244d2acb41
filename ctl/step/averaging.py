"""One number per example becomes the mean over the global batch.

A step returns per-example values `[b]` or scalars. Values `[b]` are added up with their counts
over all replicas, workers and steps, so short and empty replica batches count exactly; a mean of
means would give 2.25 for [1, 2], [3] and NaN for an empty replica. Scalars are averaged over
replicas.
"""

import functools
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute import replica_sum
from ctl.errors import UsageError
from ctl.step.context import StepContext
from ctl.step.finiteness import SKIPPED
from ctl.step.keras_metrics import is_metric


def add_regularization(loss: Any, regularization: Any, num_shares: Any) -> Any:
    """Adds this replica's share of losses that are added once per step.

    Args:
      loss: `[]`.
      regularization: A structure of losses, or None.
      num_shares: Number of shares that are summed: replicas times accumulated parts.

    Returns:
      `[]`, in the dtype of the loss.
    """
    losses = [] if regularization is None else tf.nest.flatten(regularization)
    terms = [tf.cast(tf.reduce_sum(term), loss.dtype) for term in losses]
    return loss + tf.add_n(terms) / tf.cast(num_shares, loss.dtype) if terms else loss


def average(
    per_example: Any,
    *,
    global_batch_size: int,
    sample_weight: Any = None,
    mask: Any = None,
    context: StepContext = StepContext(),  # noqa: B008  immutable
) -> Any:
    """Returns the share of this replica in the mean over the global batch, as `tf.nn.compute_average_loss`.

    The shares of all replicas add up to the mean, so gradients are *summed* over replicas.

    Args:
      per_example: `[b]`, or `[b, ...]` with a mask.
      global_batch_size: Number of examples of all replicas, the divisor.
      sample_weight: `[b]`, multiplies the values. The divisor stays the global batch size.
      mask: Boolean tensor of the same shape. The mean is over the entries of the whole global batch where
        the mask is True; their number is summed over replicas.
      context: Context of the step. A placeholder row of an empty replica does not count.

    Returns:
      `[]`, in the dtype of the values.

    Raises:
      UsageError: For other shapes.
    """
    values = tf.convert_to_tensor(per_example)
    if values.shape.rank == 0:
        raise UsageError(
            "average() got a scalar; expected one number per example, shape [b]. Leave out "
            "tf.reduce_mean: average() takes the mean over the global batch. A Keras loss "
            "object averages by itself: make it with reduction=None (tf_keras: "
            "tf_keras.losses.Reduction.NONE), or call the loss function instead."
        )
    if mask is not None:
        return _average_of_unmasked(values, mask, sample_weight, context)
    if (values.shape.rank or 1) > 1:
        raise UsageError(
            f"average() got a loss of shape {values.shape}; expected one number per example, shape "
            "[b]. Reduce the other axes, e.g. with tf.reduce_mean(loss, axis=-1); for sequences of "
            "unequal length give mask=..., true where an entry counts."
        )
    if context.is_empty is not None:
        values = tf.where(context.is_empty, tf.zeros_like(values), values)
    return tf.nn.compute_average_loss(
        values, sample_weight=sample_weight, global_batch_size=global_batch_size
    )


def _average_of_unmasked(values: Any, mask: Any, sample_weight: Any, context: StepContext) -> Any:
    mask = tf.cast(tf.convert_to_tensor(mask), tf.bool)
    if not mask.shape.is_compatible_with(values.shape):
        raise UsageError(
            f"average() got values of shape {values.shape} and a mask of shape {mask.shape}; expected "
            "the same shape, one truth value per value."
        )
    sum_counts = functools.partial(_sum_counts, num_local_workers=context.num_local_workers)
    is_empty, mask_counts = context.is_empty, context.mask_counts
    count = None if mask_counts is None else mask_counts.count(mask, is_empty, sum_counts)
    if is_empty is not None:
        mask &= tf.logical_not(is_empty)
    if sample_weight is not None:
        weight = tf.cast(sample_weight, values.dtype)
        missing = values.shape.rank - weight.shape.rank
        values *= tf.reshape(weight, tf.concat([tf.shape(weight), [1] * missing], axis=0))
    total = tf.reduce_sum(tf.where(mask, values, tf.zeros_like(values)))
    if count is None:
        count = sum_counts(tf.math.count_nonzero(mask, dtype=tf.float32))
    return tf.math.divide_no_nan(total, tf.cast(count, values.dtype))


def _sum_counts(count: Any, num_local_workers: int = 0) -> Any:
    """Returns the sum of a count `[]` over replicas, in replica context.

    Workers that train independently count as if all of them had the same number.
    """
    if num_local_workers:
        return count * num_local_workers
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return count
    return tf.stop_gradient(replica_sum.sum_over_all_replicas(count))


_EXACT_IN_FLOAT32 = 2**24
_NONE: Mapping[str, Any] = MappingProxyType({})
ROWS = ""  # name of the row that counts examples, which no value of a step can have


class Totals:
    """Sums and counts of a step's values, as one float64 matrix `[m, 2]` for m names.

    Sums are kept in float64 and means are rounded to float32, so that a mean does not depend on how steps
    were cut into loops.

    Args:
      full_rows: Number of rows of a full batch of one replica, or of a part of it.

    Attributes:
      names: Names of the rows, known after the trace of a step.
      metrics: Keras metrics that a step has returned, by name.
    """

    def __init__(self, full_rows: int = 1) -> None:
        self.names: tuple[str, ...] = ()
        self.metrics: dict[str, Any] = {}
        self._full_rows = full_rows
        self._names_by_thread: dict[int, tuple[str, ...]] = {}  # replicas trace in threads, in turns

    def pack(
        self,
        scores: Mapping[str, Any],
        num_examples: Any,
        norms: Mapping[str, Any] = _NONE,
        is_empty: Any = None,
    ) -> tf.Tensor:
        """Packs the values of one replica. Called while a step is traced.

        Args:
          scores: By name: `[b]`, `[]`, a pair (parts of a sum, parts of its count) of any shapes, or a
            Keras metric, which is added to `metrics` and not packed.
          num_examples: Number of examples, an int if it is static, else a scalar tensor.
          norms: By name: a scalar or a pair (sum, count), appended to the values.
          is_empty: `[]` bool, True where this replica has no example and no value counts, or None.

        Returns:
          `[m, 2]` float64.

        Raises:
          UsageError: If a name is no string or is reported by ctl.
        """
        if not all(isinstance(n, str) for n in scores):
            raise UsageError(f"the step returned the names {list(scores)}; expected strings.")
        metrics = {n: v for n, v in scores.items() if is_metric(v)}
        self.metrics.update(metrics)
        names = tuple(sorted(n for n in scores if n not in metrics))
        pairs = [_sum_and_count(name, scores[name], num_examples) for name in names]
        names, pairs = (*names, ROWS), [*pairs, (self._is_full(num_examples), num_examples)]
        if is_empty is not None:
            pairs = [tuple(tf.where(is_empty, tf.zeros_like(x), x) for x in p) for p in pairs]
        if reserved := set(norms) & set(scores):
            raise UsageError(
                f"the step returned {min(reserved)!r}, which ctl reports; choose another name."
            )
        self._set_names((*names, *norms))
        pairs += [norm if isinstance(norm, tuple) else (norm, 1.0) for norm in norms.values()]
        return tf.stack([_stack([s for s, _ in pairs]), _stack([c for _, c in pairs])], axis=1)

    @property
    def _traced_names(self) -> tuple[str, ...]:
        return self._names_by_thread[threading.get_ident()]

    def _set_names(self, names: tuple[str, ...]) -> None:
        self.names = self._names_by_thread[threading.get_ident()] = names

    def _is_full(self, num_examples: Any) -> Any:
        if isinstance(num_examples, int):
            return float(num_examples >= self._full_rows)
        return tf.cast(num_examples >= tf.cast(self._full_rows, num_examples.dtype), tf.float64)

    def append(self, packed: tf.Tensor, norms: Mapping[str, Any]) -> tf.Tensor:
        """Appends the rows of norms to the result of a `pack` without norms, while a step is traced."""
        names, rows = self._traced_names, self.pack({}, 0, norms)[1:]
        self._set_names(names + self._traced_names[1:])
        return tf.concat([packed, rows], axis=0)

    def left_out(self, packed: tf.Tensor, is_valid: Any) -> tf.Tensor:
        """Sets the values of an invalid step to zero, except the count of examples. Called while tracing.

        Args:
          packed: Result of a `pack` without norms.
          is_valid: `[]` bool, False where the step is left out.

        Returns:
          `packed` with a row SKIPPED. Its mean is the share of skipped steps.
        """
        names = self._traced_names
        rows = tf.constant([[n == ROWS] * 2 for n in names])
        values = tf.where(is_valid | rows, packed, tf.zeros_like(packed))
        self._set_names((*names, SKIPPED))
        skipped = tf.stack([1.0 - tf.cast(is_valid, tf.float64), 1.0])
        return tf.concat([values, skipped[None]], axis=0)

    @staticmethod
    def zeros() -> tf.Tensor:
        """Returns the neutral element of sums of packed matrices of any length."""
        return tf.zeros([1, 2], tf.float64)

    def means(self, packed: np.ndarray) -> dict[str, float]:
        """Returns means by name of a matrix summed over replicas and steps. The mean of no value is NaN."""
        sums, counts = self.broadcast(packed).T
        with np.errstate(divide="ignore", invalid="ignore"):
            means = (sums / counts).astype(np.float32)
        pairs = zip(self.names, means, strict=True)
        return {name: float(mean) for name, mean in pairs if name != ROWS}

    def num_rows(self, packed: np.ndarray) -> float:
        """Returns the number of examples of a summed matrix."""
        return float(packed[self.names.index(ROWS), 1]) if ROWS in self.names else 0.0

    def num_full(self, packed: np.ndarray) -> float:
        """Returns how many times a replica had its share of a full batch."""
        return float(packed[self.names.index(ROWS), 0]) if ROWS in self.names else 0.0

    def broadcast(self, packed: Any) -> np.ndarray:
        """Returns the matrix `[m, 2]`. The result of `zeros` becomes zeros of this shape."""
        return np.array(np.broadcast_to(np.asarray(packed, np.float64), [len(self.names), 2]))


def _stack(values: Any) -> tf.Tensor:
    """Stacks numbers and tensors of mixed dtypes to one float64 vector, in few operations."""
    if not any(tf.is_tensor(v) for v in values):
        return tf.constant(values, tf.float64)
    dtypes = {v.dtype for v in values if tf.is_tensor(v)}
    constants = [v for v in values if not tf.is_tensor(v)]
    can_cast = all(v == int(v) for v in constants) or all(d.is_floating for d in dtypes)
    if len(dtypes) == 1 and can_cast and all(abs(v) < _EXACT_IN_FLOAT32 for v in constants):
        (dtype,) = dtypes
        return tf.cast(tf.stack([tf.cast(v, dtype) for v in values]), tf.float64)
    return tf.stack([tf.cast(v, tf.float64) for v in values])


def _sum_and_count(name: str, value: Any, num_examples: Any) -> Any:
    if isinstance(value, tuple):
        if len(value) != 2:
            raise UsageError(
                f"the step returned {len(value)} values as {name!r}; expected one, or the pair (parts "
                "of a sum, parts of its count), e.g. (loss * mask, mask)."
            )
        return tuple(tf.reduce_sum(tf.cast(v, tf.float64)) for v in value)
    value = tf.convert_to_tensor(value)
    if value.dtype == tf.bool or value.dtype.is_integer:
        value = tf.cast(value, tf.float64)
    elif value.dtype in (tf.float16, tf.bfloat16):
        value = tf.cast(value, tf.float32)
    elif not value.dtype.is_floating:
        raise UsageError(f"the step returned {name!r} of dtype {value.dtype.name}; expected a number.")
    if value.shape.rank == 1:
        static = value.shape[0]
        return tf.reduce_sum(value), float(static) if static is not None else tf.size(value)
    if value.shape.rank == 0:
        if isinstance(num_examples, int):
            return (value, 1.0) if num_examples else (tf.zeros_like(value), 0.0)
        some = num_examples > 0
        return tf.where(some, value, tf.zeros_like(value)), tf.cast(some, tf.float64)
    raise UsageError(
        f"the step returned {name!r} of shape {value.shape}; expected one number per example, "
        "shape [b], or a scalar. Reduce the other axes, e.g. with "
        "tf.reduce_mean(value, axis=range(1, value.shape.rank))."
    )
