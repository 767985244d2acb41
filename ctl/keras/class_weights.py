"""Weights of the classes of a classification."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError


def class_weights(weights: Mapping[int, float]) -> Callable[[Any], tf.Tensor]:
    """Returns a function of labels `[b]`, `[b, 1]` or one-hot `[b, n]` that returns their weights `[b]`.

    Args:
      weights: Label -> weight. Other labels have weight 1.

    Raises UsageError for an empty dictionary or labels that are not integers >= 0.
    """
    by_label: dict[int, float] = {}
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        by_label = {int(k): float(w) for k, w in weights.items() if float(k) == int(k) and int(k) >= 0}
    if not by_label or len(by_label) < len(weights):
        shown = dict(weights) if isinstance(weights, Mapping) else weights
        raise UsageError(
            f"class_weight is {shown!r:.200}; expected a dictionary from labels (0, 1, ...) to weights."
        )
    table = [by_label.get(label, 1.0) for label in range(max(by_label) + 1)]

    def weight_of(labels: Any) -> Any:
        if labels.shape.rank and labels.shape.rank > 1:
            one_hot = labels.shape[-1] != 1
            labels = tf.argmax(labels, axis=-1) if one_hot else tf.squeeze(labels, axis=-1)
        if labels.dtype.is_floating:
            labels = tf.round(labels)
        index = tf.cast(labels, tf.int32)
        is_listed = (index >= 0) & (index < len(table))
        weights = tf.gather(tf.constant(table), tf.where(is_listed, index, 0))
        return tf.where(is_listed, weights, 1.0)

    return weight_of
