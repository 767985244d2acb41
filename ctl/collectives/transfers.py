"""Execution of large collectives between the ranks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from ctl.collectives import memory, trees
from ctl.collectives.allreduce import allreduce
from ctl.collectives.arithmetic import split_rows, to_numpy_dtype
from ctl.collectives.mesh import Mesh
from ctl.collectives.reduce_scatter import reduce_scatter
from ctl.collectives.requests import Request
from ctl.collectives.transfer_costs import NetworkCosts

TransferRequest = tuple[Request, Sequence[np.ndarray]]
AlgorithmChoice = tuple[str, NetworkCosts]  # algorithm, and costs for "auto"


def execute_transfers(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    header: dict[str, Any],
    transfer_requests: Sequence[TransferRequest],
) -> list[list[np.ndarray]]:
    """Executes the collectives of one response of the coordinator.

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks.
      me: Index of this rank in `ranks`.
      header: Header of the response.
      transfer_requests: Requests with their flat arrays. Several requests are all-reduces, which are fused.

    Returns:
      The flat results of each request.
    """
    mesh.require_links(ranks)
    request, arrays = transfer_requests[0]
    choice = header.get("algorithm", "auto"), NetworkCosts.of_header(header)
    if request.kind == "allreduce":
        return _all_reduce(mesh, ranks, me, transfer_requests, choice)
    if request.kind == "broadcast":
        return [[_broadcast(mesh, ranks, me, a, request.root, choice) for a in arrays]]
    if request.kind == "alltoall":
        return [[_all_to_all(mesh, ranks, me, request, arrays[0], header["splits"], choice)]]
    if request.kind == "allgather":
        return [
            [
                _all_gather(
                    mesh, ranks, me, array, request.shapes[i], [r[i] for r in header["rows"]], choice
                )
                for i, array in enumerate(arrays)
            ]
        ]
    return [
        [
            _reduce_scatter(mesh, ranks, me, array, shape, request.op, choice)
            for array, shape in zip(arrays, request.shapes, strict=True)
        ]
    ]


def _all_reduce(
    mesh: Any, ranks: Any, me: Any, transfer_requests: Sequence[TransferRequest], choice: AlgorithmChoice
) -> list[list[np.ndarray]]:
    """Reduces all tensors of a dtype as one vector."""
    op = transfer_requests[0][0].op
    all_arrays = [array for _, arrays in transfer_requests for array in arrays]
    totals: list[np.ndarray] = [array[:0] for array in all_arrays]
    for dtype in dict.fromkeys(array.dtype for array in all_arrays):
        indices = [i for i, array in enumerate(all_arrays) if array.dtype == dtype]
        reduced = allreduce(mesh, ranks, me, [all_arrays[i] for i in indices], op, *choice)
        for i, total in zip(indices, reduced, strict=True):
            totals[i] = total
    remaining_totals = iter(totals)
    return [[next(remaining_totals) for _ in arrays] for _, arrays in transfer_requests]


def _broadcast(
    mesh: Any, ranks: Any, me: Any, array: np.ndarray, root: int, choice: AlgorithmChoice
) -> np.ndarray:
    buffer = memory.allocate_aligned(array.size, array.dtype)  # aligned, so that TensorFlow needs no copy
    if ranks[me] == root:
        buffer[...] = array
    trees.broadcast_bytes(mesh, ranks, me, buffer.view(np.uint8), list(ranks).index(root), *choice)
    return buffer


def _row_size(shape: Sequence[int], dtype: np.dtype) -> int:
    return math.prod(shape[1:]) * dtype.itemsize


def _all_gather(
    mesh: Any, ranks: Any, me: Any, array: Any, shape: Any, rows: Sequence[int], choice: AlgorithmChoice
) -> np.ndarray:
    sizes = [count * _row_size(shape, array.dtype) for count in rows]
    gathered = trees.allgather_bytes(mesh, ranks, me, array.view(np.uint8), sizes, *choice)
    return gathered.view(array.dtype)


def _all_to_all(
    mesh: Any, ranks: Any, me: Any, request: Request, array: Any, splits: Any, choice: AlgorithmChoice
) -> np.ndarray:
    row = _row_size(request.shapes[0], to_numpy_dtype(request.dtypes[0]))
    sizes = [[count * row for count in counts] for counts in splits]
    return trees.alltoall_bytes(mesh, ranks, me, array.view(np.uint8), sizes, *choice).view(array.dtype)


def _reduce_scatter(
    mesh: Any, ranks: Any, me: Any, array: Any, shape: Any, op: Any, choice: AlgorithmChoice
) -> np.ndarray:
    row = math.prod(shape[1:])
    sizes = [rows * row for rows in split_rows(shape[0], len(ranks))]
    return reduce_scatter(mesh, ranks, me, array, sizes, op, *choice)
