"""Collectives of large tensors over a mesh: bandwidth does not grow with the number of ranks.

`ranks` are those that take part, in order; `me` is this rank's index among them. All buffers are
one-dimensional NumPy arrays.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from ctl.collectives.arithmetic import reduce_to
from ctl.collectives.mesh import Mesh

_ALIGNMENT = 64
_PIECE = 1 << 20  # bytes of a broadcast on their way at a time


def ring_allreduce(mesh: Mesh, ranks: Sequence[int], me: int, mine: np.ndarray, op: int) -> np.ndarray:
    """A new array; each part is reduced by one rank and handed on, so all get the same bits."""
    count = len(ranks)
    bounds = [mine.size * i // count for i in range(count + 1)]
    total = _aligned(mine)
    _reduce_parts(mesh, ranks, me, mine, total, bounds, op)
    after, before = ranks[(me + 1) % count], ranks[(me - 1) % count]
    for step in range(count - 1):
        out, into = (me - step) % count, (me - step - 1) % count
        mesh.exchange(after, _part(total, bounds, out), before, _part(total, bounds, into))
    return total


def ring_reducescatter(
    mesh: Mesh, ranks: Sequence[int], me: int, mine: np.ndarray, sizes: Sequence[int], op: int
) -> np.ndarray:
    """This rank's part of the reduced array; `sizes` are elements by rank."""
    bounds = _bounds(sizes)
    total = _aligned(mine)
    _reduce_parts(mesh, ranks, me, mine, total, bounds, op)
    return _part(total, bounds, me)


def _reduce_parts(mesh: Any, ranks: Any, me: Any, mine: Any, total: Any, bounds: Any, op: Any) -> None:
    """Leaves part i of `total` reduced on rank i of the ring."""
    count = len(ranks)
    if count == 1:
        total[...] = mine
    after, before = ranks[(me + 1) % count], ranks[(me - 1) % count]
    largest = max(b - a for a, b in pairwise(bounds))
    scratch = mesh.scratch(largest * mine.itemsize)[: largest * mine.itemsize].view(mine.dtype)
    for step in range(count - 1):
        out, into = (me - step - 1) % count, (me - step - 2) % count
        reduced = _part(total, bounds, into)
        came = scratch[: reduced.size]
        mesh.exchange(after, _part(total if step else mine, bounds, out), before, came)
        reduce_to(reduced, op, _part(mine, bounds, into), came)


def ring_allgather(
    mesh: Mesh, ranks: Sequence[int], me: int, mine: np.ndarray, sizes: Sequence[int]
) -> np.ndarray:
    """Bytes of all ranks, joined in order; `sizes` are bytes by rank."""
    count = len(ranks)
    bounds = _bounds(sizes)
    joined = np.empty(bounds[-1], np.uint8)
    _part(joined, bounds, me)[...] = mine
    after, before = ranks[(me + 1) % count], ranks[(me - 1) % count]
    for step in range(count - 1):
        out, into = (me - step) % count, (me - step - 1) % count
        mesh.exchange(after, _part(joined, bounds, out), before, _part(joined, bounds, into))
    return joined


def ring_broadcast(mesh: Mesh, ranks: Sequence[int], me: int, buffer: np.ndarray, root: int) -> None:
    """Fills `buffer`, bytes, on every rank with the root's; `root` is an index of `ranks`.

    Piece by piece along a chain, so that all links are busy at once.
    """
    count = len(ranks)
    if count == 1:
        return
    place = (me - root) % count
    before = ranks[(me - 1) % count]
    after = ranks[(me + 1) % count]
    pieces = [buffer[i : i + _PIECE] for i in range(0, buffer.size, _PIECE)]
    nothing = buffer[:0]
    is_last = place == count - 1
    for i in range(len(pieces) + 1):  # receives piece i while it hands on piece i - 1
        into = pieces[i] if i < len(pieces) and place else nothing
        out_index = i - 1 if place else i
        has_out = not is_last and 0 <= out_index < len(pieces)
        mesh.exchange(after, pieces[out_index] if has_out else nothing, before, into)


def ring_alltoall(
    mesh: Mesh, ranks: Sequence[int], me: int, mine: np.ndarray, sizes: Sequence[Sequence[int]]
) -> np.ndarray:
    """Bytes for this rank from all, joined in order; `sizes[i][j]` are bytes from i to j."""
    count = len(ranks)
    out_bounds = _bounds(sizes[me])
    in_bounds = _bounds([row[me] for row in sizes])
    joined = np.empty(in_bounds[-1], np.uint8)
    _part(joined, in_bounds, me)[...] = _part(mine, out_bounds, me)
    for shift in range(1, count):
        to, source = (me + shift) % count, (me - shift) % count
        mesh.exchange(
            ranks[to], _part(mine, out_bounds, to), ranks[source], _part(joined, in_bounds, source)
        )
    return joined


def _aligned(like: np.ndarray) -> np.ndarray:
    """A new array that begins where TensorFlow wants tensors to: it takes such without a copy."""
    memory = np.empty(like.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + like.nbytes].view(like.dtype)


def _bounds(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]


def _part(buffer: np.ndarray, bounds: Sequence[int], index: int) -> np.ndarray:
    return buffer[bounds[index] : bounds[index + 1]]
