"""Submission of collectives on tensors to the engine, and conversion of their results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from ctl.collectives import arithmetic, tensorflow_plane
from ctl.collectives.engine import Engine
from ctl.collectives.pending import Pending
from ctl.collectives.requests import Layout
from ctl.tensorflow_patches import eager_values

_REDUCTIONS = ("allreduce", "reducescatter")


class Members(NamedTuple):
    """Ranks of a collective.

    Attributes:
      engine: Engine of this rank.
      number: Number of the process set.
      ranks: Ranks of the process set.
    """

    engine: Engine
    number: int
    ranks: Sequence[int]


class CollectiveGroup(Protocol):
    """Ranks that run collectives together; they may change between two calls of one graph."""

    def members(self) -> Members:
        """Returns the current members.

        Raises ValueError before `init()`, and InvalidArgumentError if this rank is not a member.
        """

    def check_registered(self) -> None:
        """Raises ValueError for a group that is not registered."""


@dataclass(frozen=True)
class Call:
    """A collective, equal on all ranks.

    The fields without a comment are those of `ctl.collectives.requests.Request`.
    """

    kind: str
    name: str
    group: CollectiveGroup
    op: int = arithmetic.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    has_splits: bool = False
    is_eager: bool = True
    line: str = ""
    ignores_scope: bool = False  # the name of a node is the same within any name scope
    joined: Layout | None = None  # layout of concatenated tensors
    names: Sequence[str] = ()  # names of the collectives that are fused into this one
    fuses: bool = False  # can be fused with other calls of a function


@dataclass
class PendingCall:
    """A collective in flight, with the shapes of its inputs and its ranks."""

    call: Call
    pending: Pending
    members: Members
    shapes: list[tuple[int, ...]] = field(default_factory=list)


def submit_call(call: Call, arrays: Sequence[Any], name: str = "", line: str = "") -> PendingCall:
    """Sends the request of a collective to the engine and returns at once.

    Args:
      call: Collective.
      arrays: Arrays or eager tensors. If `call.has_splits`, the last one holds the splits.
      name: Name of the collective. Default: that of `call`.
      line: Line of the program that identifies it. Default: that of `call`.
    """
    members = call.group.members()
    ranks = members.ranks
    splits: list[int] = []
    if call.has_splits:
        *arrays, split_array = arrays
        splits = [int(count) for count in np.asarray(split_array).reshape(-1)]
    elif call.kind == "alltoall" and arrays[0].ndim and len(arrays[0]) % len(ranks) == 0:
        splits = [len(arrays[0]) // len(ranks)] * len(ranks)
    shapes = [tuple(array.shape) for array in arrays]
    plane, host_arrays, tensors, layout = members.engine.plane, [], [], call.joined
    if plane is not None and plane.can_execute(call.kind, arrays):
        tensors = [_reshape(_apply_prescale(call, tensor), [-1]) for tensor in arrays]
        layout = layout or Layout(tuple(t.dtype.name for t in tensors), tuple(shapes))
    else:
        host_arrays = [
            np.ascontiguousarray(_to_array(a)).reshape(s) for a, s in zip(arrays, shapes, strict=True)
        ]
        host_arrays = [_apply_prescale(call, array) for array in host_arrays]
    pending = members.engine.submit(
        call.kind,
        name or call.name,
        host_arrays,
        layout,
        tensors,
        may_wait=not call.is_eager,
        process_set=members.number,
        op=call.op,
        prescale=call.prescale,
        postscale=call.postscale,
        root=call.root,
        splits=splits,
        is_eager=call.is_eager,
        line=line or call.line,
        names=call.names,
    )
    return PendingCall(call, pending, members, shapes)


def _apply_prescale(call: Call, array: Any) -> Any:
    if call.kind not in _REDUCTIONS or call.prescale == 1.0:
        return array
    scale = tensorflow_plane.scale_tensor if isinstance(array, tf.Tensor) else arithmetic.scale_array
    return scale(array, call.prescale)


def wait_for_results(pending_call: PendingCall) -> list[np.ndarray]:
    """Waits for a collective and returns its results, with their shapes.

    For allgather and alltoall, the last element is the number of rows by rank. Raises the error of the
    collective.
    """
    pending, call = pending_call.pending, pending_call.call
    pending.wait()
    if pending.error is not None:
        raise pending.error
    header = pending.response or {}
    flat = list(pending.result)
    ranks = pending_call.members.ranks
    if call.kind in _REDUCTIONS:
        finish = tensorflow_plane.finish_tensor if pending.tensors else arithmetic.finish_reduction
        by_engine = call.kind == "allreduce" and not pending.tensors
        counts = [1 if by_engine and arithmetic.engine_divides(a.dtype) else len(ranks) for a in flat]
        flat = [finish(a, call.op, n, call.postscale) for a, n in zip(flat, counts, strict=True)]
    if call.kind in ("allreduce", "broadcast"):
        return [_reshape(a, shape) for a, shape in zip(flat, pending_call.shapes, strict=True)]
    index = ranks.index(pending_call.members.engine.ranks.rank)
    if call.kind == "reducescatter":
        rows = [arithmetic.split_rows(shape[0], len(ranks))[index] for shape in pending_call.shapes]
    elif call.kind == "allgather":
        by_rank = np.asarray(header["rows"], np.int64)
        rows = by_rank.sum(axis=0).tolist()
    elif call.kind == "alltoall":
        by_rank = np.asarray([counts[index] for counts in header["splits"]], np.int32)
        rows = [int(by_rank.sum())]
    else:
        return []
    shaped = [
        _reshape(a, (count, *shape[1:]))
        for a, count, shape in zip(flat, rows, pending_call.shapes, strict=True)
    ]
    return shaped if call.kind == "reducescatter" else [*shaped, by_rank]


def _reshape(array: Any, shape: Sequence[int]) -> Any:
    if not isinstance(array, tf.Tensor):
        return array.reshape(shape)
    with tensorflow_plane.device_scope(array):
        return tf.reshape(array, shape)


def _to_array(value: Any) -> np.ndarray:
    """Returns the values of an eager tensor, without a copy if they are in host memory."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    return eager_values.values_of(value)
