"""Arguments of collectives: reductions, tensors and default names."""

from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf
from ctl.collectives import arithmetic
from ctl.hvd.errors import RefusedError

Average, Sum, Adasum = arithmetic.AVERAGE, arithmetic.SUM, arithmetic.ADASUM
Min, Max, Product = arithmetic.MIN, arithmetic.MAX, arithmetic.PRODUCT


_UNSUPPORTED_DTYPES = {dtype.as_datatype_enum for dtype in (tf.string, tf.resource, tf.variant)}


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Returns the reduction of `op` and the deprecated `average`. Raises ValueError if both are given."""
    if op is not None and average is not None:
        raise ValueError("got op and average; expected op only, because average is deprecated.")
    if op is None:
        return Sum if average is False else Average
    return check_reduction(op)


def check_reduction(op: int) -> int:
    """Returns `op` if it is a valid reduction. Raises RefusedError for Adasum, otherwise ValueError."""
    if op == Adasum:
        raise RefusedError(
            "Adasum is not supported. Use op=hvd.Average and increase the learning rate gradually with "
            "hvd.callbacks.LearningRateWarmupCallback."
        )
    if not isinstance(op, Hashable) or op not in arithmetic.OPS:
        raise ValueError(f"op is {op!r}; expected hvd.Average, Sum, Min, Max or Product.")
    return op


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Returns True if `num_rank` is a power of 2: 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def to_tensor(value: Any) -> tf.Tensor:
    """Converts the argument of a collective. Raises an error for strings and `tf.IndexedSlices`."""
    if isinstance(value, tf.IndexedSlices):
        raise NotImplementedError("got tf.IndexedSlices; expected a tensor (tf.convert_to_tensor).")
    is_eager = tf.executing_eagerly() and isinstance(value, tf.Tensor)
    tensor = value if is_eager else tf.convert_to_tensor(value)
    if tensor.dtype.as_datatype_enum in _UNSUPPORTED_DTYPES:
        raise TypeError(
            f"got a tensor of the type {tensor.dtype.name}; expected a numeric or bool type. Send strings "
            "with hvd.allgather_object() or hvd.broadcast_object()."
        )
    return tensor


def default_name(name_prefix: str, tensors: Sequence[tf.Tensor]) -> str:
    """Returns the default name. In a graph it contains the names of the first and the last tensor."""
    if tf.executing_eagerly():
        return name_prefix
    end_tensors = tensors if len(tensors) == 1 else [tensors[0], tensors[-1]]
    # the name of a captured tensor of a function is a number, which differs between ranks
    names = ["captured" if tensor.name[0].isdigit() else tensor.name for tensor in end_tensors]
    return "_".join([name_prefix, *(n.replace(":", "_").replace("/", "_") for n in names)])


def graph_name(name: str) -> str | None:
    """Returns a name for a collective in a graph, and None for an eager one."""
    return None if tf.executing_eagerly() else name
