"""Collectives of large tensors over a mesh. The bytes per rank do not grow with the number of ranks.

`ranks` are the participating ranks in order, and `me` is the index of this rank in them. Arrays are
one-dimensional. Results are new arrays with an alignment that TensorFlow accepts without a copy.
"""

import bisect
from collections.abc import Sequence

import numpy as np
from ctl.collectives import arithmetic, memory
from ctl.collectives.links import CHUNK, Consume
from ctl.collectives.mesh import Mesh

_PIECE = 1 << 20  # bytes; unit of the pipeline of a broadcast
MOST_PAIR_BYTES = 1 << 20  # maximum of a vector that two ranks exchange as a whole; part of the protocol
_SUMS = (arithmetic.SUM, arithmetic.AVERAGE)


class Joined:
    """Arrays of one dtype as one vector, without a copy. Each array starts at a multiple of 64 bytes.

    Attributes:
      total: New vector of the same size for the result.
    """

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = arrays
        self.dtype = arrays[0].dtype
        self._step = max(1, memory.ALIGNMENT // self.dtype.itemsize)
        self._starts = [0]
        for array in arrays:
            self._starts.append(self._starts[-1] + -(-array.size // self._step) * self._step)
        self._padding = np.zeros(self._step, self.dtype)
        self.total = memory.aligned(self._starts[-1], self.dtype)

    def bounds(self, count: int) -> list[int]:
        """Returns the bounds of `count` parts of similar size (elements)."""
        steps = self._starts[-1] // self._step
        return [steps * i // count * self._step for i in range(count + 1)]

    def views(self, low: int, high: int) -> list[np.ndarray]:
        """Returns the elements from `low` to `high` as views of the arrays."""
        found = []
        i = bisect.bisect_right(self._starts, low) - 1
        while low < high:
            array, start, end = self._arrays[i], self._starts[i], self._starts[i + 1]
            inner = array[low - start : high - start]
            if inner.size:
                found.append(inner)
            missing = min(end, high) - max(low, start + array.size)
            if missing > 0:
                found.append(self._padding[:missing])
            low, i = end, i + 1
        return found

    def results(self) -> list[np.ndarray]:
        """Returns views of `total` with the sizes of the arrays."""
        starts = self._starts[:-1]
        return [self.total[s : s + a.size] for s, a in zip(starts, self._arrays, strict=True)]


def ring_allreduce(
    mesh: Mesh, ranks: Sequence[int], me: int, arrays: Sequence[np.ndarray], op: int
) -> list[np.ndarray]:
    """Returns the reduced arrays, bitwise equal on all ranks: one rank reduces each part.

    For small arrays, two ranks both reduce everything in the order of ranks. The reducing rank divides a
    mean if `arithmetic.engine_divides` is True for its dtype.
    """
    joined, count = Joined(arrays), len(ranks)
    total, bounds = joined.total, joined.bounds(len(ranks))
    divides = op == arithmetic.AVERAGE and arithmetic.engine_divides(joined.dtype)
    if count == 2 and joined.total.nbytes <= MOST_PAIR_BYTES:
        _reduce_pair(mesh, ranks[1 - me], me, joined, op, divisor=2 if divides else 1)
        return joined.results()
    _reduce_parts(mesh, ranks, me, joined, bounds, op, divisor=count if divides else 1)
    after, before = ranks[(me + 1) % count], ranks[(me - 1) % count]
    for step in range(count - 1):
        out, into = (me - step) % count, (me - step - 1) % count
        part = _part(total, bounds, into)
        mesh.exchange(after, [_part(total, bounds, out)], before, part.nbytes, part)
    return joined.results()


def _reduce_pair(mesh: Mesh, other: int, me: int, joined: Joined, op: int, divisor: int) -> None:
    """Reduces everything on both ranks in the same order: as many bytes as on a ring, in one step."""
    end = joined.total.size
    consume = _reducing(joined, 0, op, divisor, mine_first=me == 0)
    mesh.exchange(other, joined.views(0, end), other, joined.total.nbytes, consume=consume)


def ring_reducescatter(
    mesh: Mesh, ranks: Sequence[int], me: int, mine: np.ndarray, sizes: Sequence[int], op: int
) -> np.ndarray:
    """Returns this rank's part of the reduced array. `sizes` are the elements by rank."""
    joined, bounds = Joined([mine]), _bounds(sizes)
    _reduce_parts(mesh, ranks, me, joined, bounds, op)
    return _part(joined.total, bounds, me)


def _reduce_parts(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    joined: Joined,
    bounds: Sequence[int],
    op: int,
    divisor: int = 1,
) -> None:
    """Reduces and divides part i of the total on rank i of the ring."""
    count, total = len(ranks), joined.total
    if count == 1:
        _copy(joined.views(bounds[0], bounds[1]), total[bounds[0] : bounds[1]])
    elif arithmetic.is_half(joined.dtype) and op in _SUMS and count > 2:
        _reduce_halves(mesh, ranks, me, joined, bounds)
        return
    after, before = ranks[(me + 1) % count], ranks[(me - 1) % count]
    for step in range(count - 1):
        out, into = (me - step - 1) % count, (me - step - 2) % count
        leaving = [_part(total, bounds, out)] if step else joined.views(bounds[out], bounds[out + 1])
        size = (bounds[into + 1] - bounds[into]) * joined.dtype.itemsize
        by = divisor if step == count - 2 else 1
        mesh.exchange(after, leaving, before, size, consume=_reducing(joined, bounds[into], op, by))


def _reducing(joined: Joined, start: int, op: int, divisor: int, mine_first: bool = True) -> Consume:
    """Returns a consumer that reduces received elements with the arrays and divides the result."""

    def consume(offset: int, chunk: np.ndarray) -> None:
        came = chunk.view(joined.dtype)
        low = start + offset // joined.dtype.itemsize
        at = 0
        for mine in joined.views(low, low + came.size):
            out = joined.total[low + at : low + at + mine.size]
            theirs = came[at : at + mine.size]
            arithmetic.reduce_to(out, op, *((mine, theirs) if mine_first else (theirs, mine)))
            arithmetic.averaged(out, divisor)
            at += mine.size

    return consume


def _reduce_halves(
    mesh: Mesh, ranks: Sequence[int], me: int, joined: Joined, bounds: Sequence[int]
) -> None:
    """Reduces 16-bit floats of more than two ranks like `_reduce_parts`, in float32 with one rounding.

    Sends as many bytes as on the ring, directly to the rank that sums them.
    """
    count, out = len(ranks), _part(joined.total, bounds, me)
    _copy(joined.views(bounds[me], bounds[me + 1]), out)
    total = np.zeros(out.size, np.float32)
    arithmetic.accumulate(total, out)

    def consume(offset: int, chunk: np.ndarray) -> None:
        came = chunk.view(joined.dtype)
        low = offset // joined.dtype.itemsize
        arithmetic.accumulate(total[low : low + came.size], came)

    for shift in range(1, count):
        to, source = (me + shift) % count, (me - shift) % count
        leaving = joined.views(bounds[to], bounds[to + 1])
        mesh.exchange(ranks[to], leaving, ranks[source], out.nbytes, consume=consume)
    arithmetic.rounded(total, out)


def ring_allgather(
    mesh: Mesh, ranks: Sequence[int], me: int, mine: np.ndarray, sizes: Sequence[int]
) -> np.ndarray:
    """Returns the concatenated bytes of all ranks in order. `sizes` are the bytes by rank."""
    count = len(ranks)
    bounds = _bounds(sizes)
    joined = memory.aligned(bounds[-1], np.dtype(np.uint8))
    _part(joined, bounds, me)[...] = mine
    after, before = ranks[(me + 1) % count], ranks[(me - 1) % count]
    for step in range(count - 1):
        out, into = (me - step) % count, (me - step - 1) % count
        part = _part(joined, bounds, into)
        mesh.exchange(after, [_part(joined, bounds, out)], before, part.nbytes, part)
    return joined


def ring_broadcast(mesh: Mesh, ranks: Sequence[int], me: int, buffer: np.ndarray, root: int) -> None:
    """Copies the root's bytes to `buffer` on all ranks. `root` is an index of `ranks`.

    The pieces form a pipeline along a chain of ranks, so all links are busy at the same time.
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
    for i in range(len(pieces) + 1):  # receives piece i and sends piece i - 1
        into = pieces[i] if i < len(pieces) and place else nothing
        out_index = i - 1 if place else i
        has_out = not is_last and 0 <= out_index < len(pieces)
        mesh.exchange(after, [pieces[out_index]] if has_out else [], before, into.nbytes, into)


def ring_alltoall(
    mesh: Mesh, ranks: Sequence[int], me: int, mine: np.ndarray, sizes: Sequence[Sequence[int]]
) -> np.ndarray:
    """Returns the concatenated bytes for this rank. `sizes[i][j]` are the bytes from rank i to rank j."""
    count = len(ranks)
    out_bounds = _bounds(sizes[me])
    in_bounds = _bounds([row[me] for row in sizes])
    joined = memory.aligned(in_bounds[-1], np.dtype(np.uint8))
    _part(joined, in_bounds, me)[...] = _part(mine, out_bounds, me)
    for shift in range(1, count):
        to, source = (me + shift) % count, (me - shift) % count
        part = _part(joined, in_bounds, source)
        mesh.exchange(ranks[to], [_part(mine, out_bounds, to)], ranks[source], part.nbytes, part)
    return joined


def _copy(views: Sequence[np.ndarray], out: np.ndarray) -> None:
    at = 0
    for view in views:
        out[at : at + view.size] = view
        at += view.size


def _bounds(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]


def _part(buffer: np.ndarray, bounds: Sequence[int], index: int) -> np.ndarray:
    return buffer[bounds[index] : bounds[index + 1]]


assert CHUNK % memory.ALIGNMENT == 0  # so that no element is split between chunks
