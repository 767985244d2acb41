"""Values that a step logs by name. They travel with the values that it returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Logged:
    """A logged value of one replica.

    Attributes:
      value: `[b]` or `[]`.
      share: Share of a step that this trace is, if values are summed. None if they are averaged.
    """

    value: Any
    share: float | None = None


def logged(name: str, value: Any, reduce: str, *, num_shares: int, is_empty: Any) -> Logged:
    """Returns the record of a logged value.

    Args:
      name: Name in reports.
      value: `[b]` or `[]`, a number.
      reduce: "mean" over examples, or over replicas; or "sum" over replicas within a step. Writers receive
        the mean of these sums over steps.
      num_shares: Number of traces that form one step: replicas times parts of a batch.
      is_empty: `[]` bool, True where this replica has no example, or None.

    Raises:
      UsageError: If the value is not a number, or `reduce` is unknown.
    """
    if reduce not in REDUCTIONS:
        raise UsageError(f"log({name!r}, reduce={reduce!r}): expected 'mean' or 'sum'.")
    value = tf.convert_to_tensor(value)
    is_number = value.dtype.is_floating or value.dtype.is_integer or value.dtype == tf.bool
    if not is_number or value.shape.rank not in (0, 1):
        raise UsageError(
            f"log({name!r}) in a step got {value.dtype.name} of shape {value.shape}; expected a scalar, or "
            "one number per example, shape [b]. Texts, histograms, pictures and sounds are for hooks."
        )
    if reduce == "mean":
        return Logged(value)
    total = tf.reduce_sum(tf.cast(value, tf.float64))
    if is_empty is not None:
        total = tf.where(is_empty, tf.zeros_like(total), total)
    return Logged(total, 1.0 / num_shares)


def split(
    scores: Mapping[str, Any], logged_values: Mapping[str, Logged]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separates values to average from values to sum.

    Args:
      scores: Values that the step returned.
      logged_values: Values that it logged.

    Returns:
      The values to average by name, and pairs (sum, count) of the others by name.

    Raises:
      UsageError: If a name is used twice.
    """
    for name in logged_values:
        if name in scores:
            raise UsageError(f"the step returned {name!r} and logged it; choose another name for one.")
    means = {name: r.value for name, r in logged_values.items() if r.share is None}
    sums = {name: (r.value, r.share) for name, r in logged_values.items() if r.share is not None}
    return {**scores, **means}, sums
