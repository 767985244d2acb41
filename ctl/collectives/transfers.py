"""Execution of collectives between the ranks, in the coordinator's order."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from ctl.collectives import memory, rings
from ctl.collectives.arithmetic import dtype_named, rows_of
from ctl.collectives.mesh import Mesh
from ctl.collectives.requests import Request

TransferRequest = tuple[Request, Sequence[np.ndarray]]


def carried_out(
    mesh: Mesh, ranks: Sequence[int], me: int, header: dict[str, Any], asked: Sequence[TransferRequest]
) -> list[list[np.ndarray]]:
    """Returns flat results for each request of one response. Several requests are fused all-reduces."""
    request, arrays = asked[0]
    if request.kind == "allreduce":
        return _reduced(mesh, ranks, me, asked)
    if request.kind == "broadcast":
        return [[_broadcast(mesh, ranks, me, a, request.root) for a in arrays]]
    if request.kind == "alltoall":
        return [[_exchanged(mesh, ranks, me, request, arrays[0], header["splits"])]]
    if request.kind == "allgather":
        return [
            [
                _gathered(mesh, ranks, me, array, request.shapes[i], [r[i] for r in header["rows"]])
                for i, array in enumerate(arrays)
            ]
        ]
    return [
        [
            _scattered(mesh, ranks, me, array, shape, request.op)
            for array, shape in zip(arrays, request.shapes, strict=True)
        ]
    ]


def _reduced(mesh: Any, ranks: Any, me: Any, asked: Sequence[TransferRequest]) -> list[list[np.ndarray]]:
    """Reduces all tensors of a dtype as one vector."""
    op = asked[0][0].op
    everything = [array for _, arrays in asked for array in arrays]
    totals: list[np.ndarray] = [array[:0] for array in everything]
    for dtype in dict.fromkeys(array.dtype for array in everything):
        chosen = [i for i, array in enumerate(everything) if array.dtype == dtype]
        reduced = rings.ring_allreduce(mesh, ranks, me, [everything[i] for i in chosen], op)
        for i, total in zip(chosen, reduced, strict=True):
            totals[i] = total
    found = iter(totals)
    return [[next(found) for _ in arrays] for _, arrays in asked]


def _broadcast(mesh: Any, ranks: Any, me: Any, array: np.ndarray, root: int) -> np.ndarray:
    buffer = memory.aligned(array.size, array.dtype)  # aligned, so that TensorFlow needs no copy
    if ranks[me] == root:
        buffer[...] = array
    rings.ring_broadcast(mesh, ranks, me, buffer.view(np.uint8), list(ranks).index(root))
    return buffer


def _row(shape: Sequence[int], dtype: np.dtype) -> int:
    return math.prod(shape[1:]) * dtype.itemsize


def _gathered(mesh: Any, ranks: Any, me: Any, array: Any, shape: Any, rows: Sequence[int]) -> np.ndarray:
    sizes = [count * _row(shape, array.dtype) for count in rows]
    return rings.ring_allgather(mesh, ranks, me, array.view(np.uint8), sizes).view(array.dtype)


def _exchanged(mesh: Any, ranks: Any, me: Any, request: Request, array: Any, splits: Any) -> np.ndarray:
    row = _row(request.shapes[0], dtype_named(request.dtypes[0]))
    sizes = [[count * row for count in counts] for counts in splits]
    return rings.ring_alltoall(mesh, ranks, me, array.view(np.uint8), sizes).view(array.dtype)


def _scattered(mesh: Any, ranks: Any, me: Any, array: Any, shape: Any, op: Any) -> np.ndarray:
    row = math.prod(shape[1:])
    sizes = [rows * row for rows in rows_of(shape[0], len(ranks))]
    return rings.ring_reducescatter(mesh, ranks, me, array, sizes, op)
