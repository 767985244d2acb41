"""Batch normalization with the mean and the variance of the batches of all ranks."""

from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.hvd import arguments, ops, process
from ctl.hvd.process_sets import global_process_set
from ctl.hvd.reducing import has_peers_in


@tf.keras.utils.register_keras_serializable(package="ctl.hvd")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalization layer of `tf.keras` (Keras 3 or tf_keras), synchronized between ranks.

    A call with training=True is collective. Every example has equal weight, so the batch sizes of ranks may
    differ. The arguments are those of BatchNormalization; `fused` may only be False or None.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any):
        if fused:
            raise UsageError(
                "SyncBatchNormalization got fused=True; expected fused=False, because the fused operation "
                "cannot use the statistics of all ranks."
            )
        if not hasattr(tf.keras, "ops"):
            kwargs["fused"] = False  # tf_keras; Keras 3 has no such argument
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if not (process.is_initialized() and has_peers_in(global_process_set)):
            return mean, variance
        mask = kwargs.get("mask", args[-1] if args and tf.is_tensor(args[-1]) else None)
        count = _count_values(inputs, mask, mean)
        # one exchange of [1 + 2 * channels]: the number of values, their sums and their sums of squares
        flat = [tf.reshape(part * count, [-1]) for part in (mean, variance + mean * mean)]
        sums = ops.allreduce(
            tf.concat([tf.reshape(count, [1]), *flat], 0),
            op=arguments.Sum,
            name="SyncBatchNormalization",
            ignore_name_scope=True,
        )
        total = tf.maximum(sums[0], 1.0)
        mean_of_all, square_of_all = tf.split(sums[1:] / total, 2)
        variance_of_all = tf.maximum(square_of_all - mean_of_all * mean_of_all, 0.0)
        return tf.reshape(mean_of_all, tf.shape(mean)), tf.reshape(variance_of_all, tf.shape(mean))


def _count_values(inputs: Any, mask: Any, mean: Any) -> tf.Tensor:
    """Returns the number of values per channel, `[]`, in the type of the mean."""
    if mask is None:
        return tf.cast(tf.size(inputs) // tf.size(mean), mean.dtype)
    values_per_mask_element = tf.size(inputs) // tf.size(mean) // tf.maximum(tf.size(mask), 1)
    return tf.reduce_sum(tf.cast(mask, mean.dtype)) * tf.cast(values_per_mask_element, mean.dtype)
