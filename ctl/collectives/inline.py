"""Execution of small collectives by the coordinator. Requests and responses contain the data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ctl.collectives import arithmetic
from ctl.collectives.arithmetic import AVERAGE, average_array, engine_divides, split_rows, to_numpy_dtype
from ctl.collectives.requests import Request


def equal_algorithm(count: int) -> str:
    """Returns the algorithm of an all-reduce of `count` ranks with the result of `execute_inline`."""
    return "ring" if count == 2 else "doubling"


def execute_inline(
    ranks: Sequence[int], requests: Mapping[int, Request], payloads: Mapping[int, bytes]
) -> dict[int, list[bytes]]:
    """Executes a collective. The requests must be consistent (`requests.find_error`).

    Reductions are not scaled. A mean is divided if `engine_divides` is True for its dtype. The result of a
    reducescatter contains only the rows of the rank.

    Returns:
      Rank -> buffers of its results.
    """
    first = requests[ranks[0]]
    if first.kind == "barrier":
        return {rank: [] for rank in ranks}
    parts = {rank: _split_payload(requests[rank], payloads[rank]) for rank in ranks}
    if first.kind == "broadcast":
        return {rank: list(parts[first.root]) for rank in ranks}
    if first.kind == "allgather":
        joined = [b"".join(parts[r][i] for r in ranks) for i in range(len(first.shapes))]
        return dict.fromkeys(ranks, joined)
    if first.kind == "alltoall":
        return _exchange_rows(ranks, requests, parts)
    totals = [
        _reduce_buffers(first.op, to_numpy_dtype(dtype), [parts[r][i] for r in ranks])
        for i, dtype in enumerate(first.dtypes)
    ]
    if first.kind == "allreduce":
        if first.op == AVERAGE:
            totals = [average_array(t, len(ranks)) if engine_divides(t.dtype) else t for t in totals]
        return {rank: [_to_bytes(total) for total in totals] for rank in ranks}
    return _scatter_rows(ranks, first, totals)


def _split_payload(request: Request, payload: bytes) -> list[bytes]:
    view = memoryview(payload)
    parts, start = [], 0
    for size in request.sizes:
        parts.append(bytes(view[start : start + size]))
        start += size
    return parts


def _to_bytes(array: np.ndarray) -> bytes:
    return array.tobytes()


def _reduce_buffers(op: int, dtype: np.dtype, buffers: Sequence[bytes]) -> np.ndarray:
    """Reduces in the order of recursive doubling in `allreduce`."""
    is_wide = op in (arithmetic.SUM, AVERAGE) and arithmetic.is_half(dtype)
    values = [np.frombuffer(buffer, dtype) for buffer in buffers]
    values = [arithmetic.to_float32(array) if is_wide else array.copy() for array in values]
    num_folds = len(values) - (1 << (len(values).bit_length() - 1))
    values = _reduce_pairs(op, values[: 2 * num_folds]) + values[2 * num_folds :]
    while len(values) > 1:
        values = _reduce_pairs(op, values)
    if not is_wide:
        return values[0]
    total = np.empty(values[0].size, dtype)
    arithmetic.round_into(values[0], total)
    return total


def _reduce_pairs(op: int, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    totals = list(values[::2])
    for total, second in zip(totals, values[1::2], strict=True):
        arithmetic.reduce_to(total, op, total, second)
    return totals


def _scatter_rows(ranks: Any, first: Request, totals: Any) -> dict[int, list[bytes]]:
    buffers_by_rank: dict[int, list[bytes]] = {rank: [] for rank in ranks}
    for shape, total in zip(first.shapes, totals, strict=True):
        start = 0
        row = total.size // shape[0] if shape[0] else 0
        for rank, rows in zip(ranks, split_rows(shape[0], len(ranks)), strict=True):
            buffers_by_rank[rank].append(_to_bytes(total[start : start + rows * row]))
            start += rows * row
    return buffers_by_rank


def _exchange_rows(ranks: Any, requests: Mapping[int, Request], parts: Any) -> dict[int, list[bytes]]:
    parts_by_rank: dict[int, list[bytes]] = {rank: [] for rank in ranks}
    for rank in ranks:
        rows = requests[rank].shapes[0][0]
        buffer = parts[rank][0]
        row = len(buffer) // rows if rows else 0
        start = 0
        for destination, count in zip(ranks, requests[rank].splits, strict=True):
            parts_by_rank[destination].append(buffer[start : start + count * row])
            start += count * row
    return {rank: [b"".join(pieces)] for rank, pieces in parts_by_rank.items()}


def parse_results(
    request: Request, arrays: Sequence[np.ndarray], header: Mapping[str, Any], payload: bytes
) -> list[np.ndarray]:
    """Returns the flat results of a rank from the payload of the response to its request."""
    if request.kind in ("allreduce", "broadcast"):
        sizes = [array.nbytes for array in arrays]
    else:
        sizes = header.get("sizes", [len(payload)])
    results, start = [], 0
    for array, size in zip(arrays, sizes, strict=False):
        count = size // array.dtype.itemsize
        results.append(np.frombuffer(payload, array.dtype, count, start))
        start += size
    return results
