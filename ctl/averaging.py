"""One number per example becomes the mean over the global batch.

A step returns per-example values `[b]` or scalars. Values `[b]` are added up with their counts
over all replicas, workers and steps, so short and empty replica batches count exactly; a mean of
means would give 2.25 for [1, 2], [3] and NaN for an empty replica. Scalars are averaged over
replicas.
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from ctl.errors import UsageError


def average(per_example, *, global_batch_size: int, sample_weight=None):
    """`[b]` -> `[]`: this replica's share of the mean over the global batch.

    The shares of all replicas add up to the mean, so gradients are to be *summed* over replicas.
    Weights `[b]` multiply the values; the divisor stays the global batch size.
    As `tf.nn.compute_average_loss`. Raises UsageError for a scalar.
    """
    per_example = tf.convert_to_tensor(per_example)
    if per_example.shape.rank == 0:
        raise UsageError(
            "average() got a scalar; expected one number per example, shape [b]. A Keras loss "
            "object averages by itself: make it with reduction=None (tf_keras: "
            "tf_keras.losses.Reduction.NONE), or call the loss function instead."
        )
    return tf.nn.compute_average_loss(
        per_example, sample_weight=sample_weight, global_batch_size=global_batch_size
    )


class Totals:
    """Sums and counts of a step's values, as one float64 matrix `[m, 2]` for m names.

    The names are known once a step was traced. Sums are kept in float64 and means are rounded to
    float32, so that a mean does not depend on how steps were cut into loops.
    """

    def __init__(self):
        self.names: tuple[str, ...] = ()
        self._tracing = threading.local()  # replicas trace in threads, in turns

    def pack(
        self, scores: Mapping[str, tf.Tensor], num_examples, norms: Sequence[tf.Tensor] = ()
    ) -> tf.Tensor:
        """Called in the trace: one replica's values -> `[m, 2]` float64.

        Args:
          scores: name -> `[b]` or `[]`.
          num_examples: b, as an int where it is static, else a scalar tensor.
          norms: scalars to add as gradient_norm, gradient_norm_2, ...
        """
        names = tuple(sorted(scores))
        if not all(isinstance(n, str) for n in names):
            raise UsageError(f"the step returned the names {list(names)}; expected strings.")
        pairs = [_sum_and_count(name, scores[name], num_examples) for name in names]
        extra = tuple("gradient_norm" + (f"_{i + 1}" if i else "") for i in range(len(norms)))
        if set(extra) & set(names):
            raise UsageError(
                f"the step returned {extra[0]!r}, which ctl reports; choose another name."
            )
        self.names = self._tracing.names = names + extra
        if not self.names:
            return tf.zeros([0, 2], tf.float64)
        pairs += [(norm, 1.0) for norm in norms]
        return tf.stack([_stack([s for s, _ in pairs]), _stack([c for _, c in pairs])], axis=1)

    def append(self, packed: tf.Tensor, norms: Sequence[tf.Tensor]) -> tf.Tensor:
        """Called in the trace after a `pack` without norms: adds their rows."""
        names, rows = self._tracing.names, self.pack({}, 0, norms)
        self.names = names + self._tracing.names
        return tf.concat([packed, rows], axis=0)

    @staticmethod
    def zeros() -> tf.Tensor:
        """The neutral start of a sum of packed matrices, whatever their length."""
        return tf.zeros([1, 2], tf.float64)

    def means(self, packed: np.ndarray) -> dict[str, float]:
        """A packed matrix, summed over replicas and steps -> name -> mean; NaN if nothing counted."""
        sums, counts = self.full(packed).T
        with np.errstate(divide="ignore", invalid="ignore"):
            means = np.float32(sums / counts)
        return {n: float(m) for n, m in zip(self.names, means, strict=True)}

    def full(self, packed) -> np.ndarray:
        """The matrix at its full length; a start that nothing was added to becomes zeros."""
        return np.array(np.broadcast_to(np.asarray(packed, np.float64), [len(self.names), 2]))


def _stack(values) -> tf.Tensor:
    """A list of numbers and tensors of mixed dtypes -> one float64 vector, in few operations."""
    if not any(tf.is_tensor(v) for v in values):
        return tf.constant(values, tf.float64)
    if all(tf.is_tensor(v) and v.dtype == values[0].dtype for v in values):
        return tf.cast(tf.stack(values), tf.float64)
    return tf.stack([tf.cast(v, tf.float64) for v in values])


def _sum_and_count(name: str, value, num_examples):
    value = tf.convert_to_tensor(value)
    if value.dtype == tf.bool or value.dtype.is_integer:
        value = tf.cast(value, tf.float64)
    elif value.dtype in (tf.float16, tf.bfloat16):
        value = tf.cast(value, tf.float32)
    elif not value.dtype.is_floating:
        raise UsageError(
            f"the step returned {name!r} of dtype {value.dtype.name}; expected a number."
        )
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
