"""Collectives on numbers, arrays and tensors. They return a tensor, or its value in a graph session."""

from typing import Any

import tensorflow as tf
from ctl.hvd import arguments, hooks, ops
from ctl.hvd.compression import Compression


def _evaluate(tensor: Any) -> Any:
    session = None if tf.executing_eagerly() else tf.compat.v1.get_default_session()
    return tensor if session is None else session.run(tensor)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Returns the value reduced over ranks with `op`, by default Average. See `ctl.hvd.allreduce`."""
    return _evaluate(
        ops.allreduce(
            tf.convert_to_tensor(value),
            average=average,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            op=op,
            compression=compression,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Returns the values of all ranks, concatenated along the first dimension."""
    return _evaluate(ops.allgather(tf.convert_to_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the value of `root_rank`."""
    return _evaluate(ops.broadcast(tf.convert_to_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: int = arguments.Average) -> Any:
    """Returns this rank's part, along the first dimension, of the value reduced over ranks."""
    return _evaluate(ops.reducescatter(tf.convert_to_tensor(value), op=op, name=name))


def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcasts the variables of `root_rank` in a graph. Raises RuntimeError when executing eagerly."""
    return _evaluate(hooks.broadcast_global_variables(root_rank))
