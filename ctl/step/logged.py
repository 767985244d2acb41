"""Numbers that a step logs by name travel with those that it returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class Logged:
    """A number of one replica, `[b]` or `[]`; `share`: of a step that this call is, if it is added up."""

    value: Any
    share: float | None = None


def logged(name: str, value: Any, reduce: str, *, parts: int, empty: Any) -> Logged:
    """What `Trainer.log` keeps of `value`; raises UsageError for what cannot be added up.

    Args:
      reduce: "mean" over examples, or replicas; or "sum", over replicas within a step, whose mean over
        steps is what writers see.
      parts: calls that make one step: replicas times parts of a batch.
      empty: true where this replica has no example; None: never.
    """
    if reduce not in REDUCTIONS:
        raise UsageError(f"log({name!r}, reduce={reduce!r}): expected 'mean' or 'sum'.")
    value = tf.convert_to_tensor(value)
    number = value.dtype.is_floating or value.dtype.is_integer or value.dtype == tf.bool
    if not number or value.shape.rank not in (0, 1):
        raise UsageError(
            f"log({name!r}) in a step got {value.dtype.name} of shape {value.shape}; expected a scalar, or "
            "one number per example, shape [b]. Texts, histograms, pictures and sounds are for hooks."
        )
    if reduce == "mean":
        return Logged(value)
    total = tf.reduce_sum(tf.cast(value, tf.float64))
    return Logged(total if empty is None else tf.where(empty, tf.zeros_like(total), total), 1.0 / parts)


def split(scores: Mapping[str, Any], found: Mapping[str, Logged]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(What a step returned and what it logged to be averaged; name -> (sum, count) of the others)."""
    graph = tf.compat.v1.get_default_graph()
    for name, one in found.items():
        if name in scores:
            raise UsageError(f"the step returned {name!r} and logged it; choose another name for one.")
        if one.value.graph is not graph:
            raise UsageError(
                f"log({name!r}) was called within a condition, a loop or a tf.function of the step, whose "
                "tensors end there. Call it afterwards, with what that returns."
            )
    means = {name: one.value for name, one in found.items() if one.share is None}
    sums = {name: (one.value, one.share) for name, one in found.items() if one.share is not None}
    return {**scores, **means}, sums
