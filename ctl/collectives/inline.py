"""Small collectives, which the coordinator executes. The requests and the responses contain the data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ctl.collectives.arithmetic import AVERAGE, averaged, dtype_named, engine_divides, reduce_to, rows_of
from ctl.collectives.requests import Request


def answers(
    ranks: Sequence[int], requests: Mapping[int, Request], payloads: Mapping[int, bytes]
) -> dict[int, list[bytes]]:
    """Returns rank -> the buffers of its result, for requests that agree.

    Reductions are not scaled. An all-reduce is divided if `engine_divides` is True for its dtype. The
    result of a reducescatter contains the rows of the rank only.
    """
    first = requests[ranks[0]]
    if first.kind == "barrier":
        return {rank: [] for rank in ranks}
    parts = {rank: _cut(requests[rank], payloads[rank]) for rank in ranks}
    if first.kind == "broadcast":
        return {rank: list(parts[first.root]) for rank in ranks}
    if first.kind == "allgather":
        joined = [b"".join(parts[r][i] for r in ranks) for i in range(len(first.shapes))]
        return dict.fromkeys(ranks, joined)
    if first.kind == "alltoall":
        return _exchanged(ranks, requests, parts)
    totals = [
        _total(first.op, dtype_named(dtype), [parts[r][i] for r in ranks])
        for i, dtype in enumerate(first.dtypes)
    ]
    if first.kind == "allreduce":
        if first.op == AVERAGE:
            totals = [averaged(t, len(ranks)) if engine_divides(t.dtype) else t for t in totals]
        return {rank: [_bytes(total) for total in totals] for rank in ranks}
    return _scattered(ranks, first, totals)


def _cut(request: Request, payload: bytes) -> list[bytes]:
    view = memoryview(payload)
    found, start = [], 0
    for size in request.sizes:
        found.append(bytes(view[start : start + size]))
        start += size
    return found


def _bytes(array: np.ndarray) -> bytes:
    return array.tobytes()


def _total(op: int, dtype: np.dtype, buffers: Sequence[bytes]) -> np.ndarray:
    total = np.frombuffer(buffers[0], dtype).copy()
    for buffer in buffers[1:]:
        reduce_to(total, op, total, np.frombuffer(buffer, dtype))
    return total


def _scattered(ranks: Any, first: Request, totals: Any) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {rank: [] for rank in ranks}
    for shape, total in zip(first.shapes, totals, strict=True):
        start = 0
        row = total.size // shape[0] if shape[0] else 0
        for rank, rows in zip(ranks, rows_of(shape[0], len(ranks)), strict=True):
            found[rank].append(_bytes(total[start : start + rows * row]))
            start += rows * row
    return found


def _exchanged(ranks: Any, requests: Mapping[int, Request], parts: Any) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {rank: [] for rank in ranks}
    for rank in ranks:
        rows = requests[rank].shapes[0][0]
        buffer = parts[rank][0]
        row = len(buffer) // rows if rows else 0
        start = 0
        for to, count in zip(ranks, requests[rank].splits, strict=True):
            found[to].append(buffer[start : start + count * row])
            start += count * row
    return {rank: [b"".join(pieces)] for rank, pieces in found.items()}


def results_of(
    request: Request, arrays: Sequence[np.ndarray], header: Mapping[str, Any], payload: bytes
) -> list[np.ndarray]:
    """Returns a rank's flat results from the payload of the response to its request."""
    if request.kind in ("allreduce", "broadcast"):
        sizes = [array.nbytes for array in arrays]
    else:
        sizes = header.get("sizes", [len(payload)])
    found, start = [], 0
    for array, size in zip(arrays, sizes, strict=False):
        count = size // array.dtype.itemsize
        found.append(np.frombuffer(payload, array.dtype, count, start))
        start += size
    return found
