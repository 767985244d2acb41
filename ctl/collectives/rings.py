"""Ring collectives of large tensors. The bytes sent per rank do not grow with the number of ranks.

In all functions, `ranks` are the participating ranks in order, and `me` is the index of this rank in them.
Arrays are one-dimensional. Results are new arrays with the alignment that TensorFlow requires.
"""

import bisect
from collections.abc import Sequence

import numpy as np
from ctl.collectives import arithmetic, memory
from ctl.collectives.mesh import Mesh
from ctl.collectives.transports.link import CHUNK, Consume

PIECE = 1 << 20  # bytes; unit of the pipeline of a broadcast; part of the protocol
MAX_PAIR_BYTES = 1 << 20  # limit for an exchange of whole vectors between two ranks; part of the protocol
_SUMS = (arithmetic.SUM, arithmetic.AVERAGE)


class JoinedArrays:
    """View of arrays of one dtype as one vector. Each array starts at a multiple of 64 bytes.

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
        self.total = memory.allocate_aligned(self._starts[-1], self.dtype)

    def bounds(self, count: int) -> list[int]:
        """Returns the `count + 1` bounds of parts of similar size (elements)."""
        steps = self._starts[-1] // self._step
        return [steps * i // count * self._step for i in range(count + 1)]

    def views(self, low: int, high: int) -> list[np.ndarray]:
        """Returns the elements from `low` to `high` as views of the arrays."""
        parts = []
        i = bisect.bisect_right(self._starts, low) - 1
        while low < high:
            array, start, end = self._arrays[i], self._starts[i], self._starts[i + 1]
            overlap = array[low - start : high - start]
            if overlap.size:
                parts.append(overlap)
            num_padding = min(end, high) - max(low, start + array.size)
            if num_padding > 0:
                parts.append(self._padding[:num_padding])
            low, i = end, i + 1
        return parts

    def fill_total(self) -> None:
        """Copies the arrays to the total."""
        at = 0
        for view in self.views(0, self.total.size):
            self.total[at : at + view.size] = view
            at += view.size

    def widened(self, low: int, high: int) -> np.ndarray:
        """Returns the elements from `low` to `high`, 16-bit floats, as a new vector of float32."""
        wide = memory.allocate_aligned(high - low, np.dtype(np.float32))
        at = 0
        for view in self.views(low, high):
            arithmetic.widen_into(view, wide[at : at + view.size])
            at += view.size
        return wide

    def results(self) -> list[np.ndarray]:
        """Returns views of `total` with the sizes of the arrays."""
        starts = self._starts[:-1]
        return [self.total[s : s + a.size] for s, a in zip(starts, self._arrays, strict=True)]


def ring_allreduce(
    mesh: Mesh, ranks: Sequence[int], me: int, arrays: Sequence[np.ndarray], op: int
) -> list[np.ndarray]:
    """Returns the reduced arrays. They are bitwise equal on all ranks, because one rank reduces each part.

    Two ranks with small arrays both reduce all elements in rank order. The reducing rank divides a mean if
    `arithmetic.engine_divides` is True for its dtype.
    """
    joined, count = JoinedArrays(arrays), len(ranks)
    total, bounds = joined.total, joined.bounds(len(ranks))
    divides = op == arithmetic.AVERAGE and arithmetic.engine_divides(joined.dtype)
    if count == 2 and joined.total.nbytes <= MAX_PAIR_BYTES:
        _reduce_pair(mesh, ranks[1 - me], me, joined, op, divisor=2 if divides else 1)
        return joined.results()
    _reduce_parts(mesh, ranks, me, joined, bounds, op, divisor=count if divides else 1)
    next_rank, previous_rank = ranks[(me + 1) % count], ranks[(me - 1) % count]
    for step in range(count - 1):
        out_index, in_index = (me - step) % count, (me - step - 1) % count
        part = _part(total, bounds, in_index)
        mesh.exchange(next_rank, [_part(total, bounds, out_index)], previous_rank, part.nbytes, part)
    return joined.results()


def _reduce_pair(mesh: Mesh, other: int, me: int, joined: JoinedArrays, op: int, divisor: int) -> None:
    """Reduces all elements on both ranks in the same order. Sends as many bytes as a ring, in one step."""
    end = joined.total.size
    consume = _create_consumer(joined, 0, op, divisor, own_first=me == 0)
    mesh.exchange(other, joined.views(0, end), other, joined.total.nbytes, consume=consume)


def ring_reducescatter(
    mesh: Mesh, ranks: Sequence[int], me: int, array: np.ndarray, sizes: Sequence[int], op: int
) -> np.ndarray:
    """Returns this rank's part of the reduced array. `sizes` are the numbers of elements by rank."""
    joined, bounds = JoinedArrays([array]), bounds_of(sizes)
    _reduce_parts(mesh, ranks, me, joined, bounds, op)
    return _part(joined.total, bounds, me)


def _reduce_parts(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    joined: JoinedArrays,
    bounds: Sequence[int],
    op: int,
    divisor: int = 1,
) -> None:
    """Reduces and divides part i of the total on rank i of the ring."""
    count, total = len(ranks), joined.total
    if count == 1:
        joined.fill_total()
    elif arithmetic.is_half(joined.dtype) and op in _SUMS and count > 2:
        _reduce_halves(mesh, ranks, me, joined, bounds)
        return
    next_rank, previous_rank = ranks[(me + 1) % count], ranks[(me - 1) % count]
    for step in range(count - 1):
        out_index, in_index = (me - step - 1) % count, (me - step - 2) % count
        outgoing = (
            [_part(total, bounds, out_index)]
            if step
            else joined.views(bounds[out_index], bounds[out_index + 1])
        )
        size = (bounds[in_index + 1] - bounds[in_index]) * joined.dtype.itemsize
        step_divisor = divisor if step == count - 2 else 1
        mesh.exchange(
            next_rank,
            outgoing,
            previous_rank,
            size,
            consume=_create_consumer(joined, bounds[in_index], op, step_divisor),
        )


def _create_consumer(
    joined: JoinedArrays, start: int, op: int, divisor: int, own_first: bool = True
) -> Consume:
    """Creates a consumer that reduces received elements with the arrays and divides the result."""

    def consume(offset: int, chunk: np.ndarray) -> None:
        received = chunk.view(joined.dtype)
        low = start + offset // joined.dtype.itemsize
        position = 0
        for own_part in joined.views(low, low + received.size):
            out = joined.total[low + position : low + position + own_part.size]
            received_part = received[position : position + own_part.size]
            arithmetic.reduce_to(
                out, op, *((own_part, received_part) if own_first else (received_part, own_part))
            )
            arithmetic.average_array(out, divisor)
            position += own_part.size

    return consume


def _reduce_halves(
    mesh: Mesh, ranks: Sequence[int], me: int, joined: JoinedArrays, bounds: Sequence[int]
) -> None:
    """Reduces 16-bit floats of more than two ranks like `_reduce_parts`, in float32 with one rounding.

    Each rank sends its elements directly to the rank that sums them. A ring would send as many bytes.
    """
    count, out = len(ranks), _part(joined.total, bounds, me)
    mesh.require_links(ranks, all_pairs=True)
    total = joined.widened(bounds[me], bounds[me + 1])

    def consume(offset: int, chunk: np.ndarray) -> None:
        received = chunk.view(joined.dtype)
        low = offset // joined.dtype.itemsize
        arithmetic.accumulate(total[low : low + received.size], received)

    for shift in range(1, count):
        destination, source = (me + shift) % count, (me - shift) % count
        outgoing = joined.views(bounds[destination], bounds[destination + 1])
        mesh.exchange(ranks[destination], outgoing, ranks[source], out.nbytes, consume=consume)
    arithmetic.round_into(total, out)


def ring_allgather(
    mesh: Mesh, ranks: Sequence[int], me: int, own_bytes: np.ndarray, sizes: Sequence[int]
) -> np.ndarray:
    """Returns the concatenated bytes of all ranks in order. `sizes` are the numbers of bytes by rank."""
    count = len(ranks)
    bounds = bounds_of(sizes)
    joined = memory.allocate_aligned(bounds[-1], np.dtype(np.uint8))
    _part(joined, bounds, me)[...] = own_bytes
    next_rank, previous_rank = ranks[(me + 1) % count], ranks[(me - 1) % count]
    for step in range(count - 1):
        out_index, in_index = (me - step) % count, (me - step - 1) % count
        part = _part(joined, bounds, in_index)
        mesh.exchange(next_rank, [_part(joined, bounds, out_index)], previous_rank, part.nbytes, part)
    return joined


def ring_broadcast(mesh: Mesh, ranks: Sequence[int], me: int, buffer: np.ndarray, root: int) -> None:
    """Copies the bytes of `buffer` on the root to `buffer` on all ranks. `root` is an index of `ranks`.

    A chain of ranks forwards the pieces as a pipeline, so all links are busy at the same time.
    """
    count = len(ranks)
    if count == 1:
        return
    chain_index = (me - root) % count
    is_last = chain_index == count - 1
    previous_rank = ranks[(me - 1) % count if chain_index else (me + 1) % count]  # the ends need one link
    next_rank = ranks[(me - 1) % count if is_last else (me + 1) % count]
    pieces = [buffer[i : i + PIECE] for i in range(0, buffer.size, PIECE)]
    empty = buffer[:0]
    for i in range(len(pieces) + 1):  # receives piece i and sends piece i - 1
        in_piece = pieces[i] if i < len(pieces) and chain_index else empty
        out_index = i - 1 if chain_index else i
        has_out = not is_last and 0 <= out_index < len(pieces)
        mesh.exchange(
            next_rank, [pieces[out_index]] if has_out else [], previous_rank, in_piece.nbytes, in_piece
        )


def ring_alltoall(
    mesh: Mesh, ranks: Sequence[int], me: int, own_bytes: np.ndarray, sizes: Sequence[Sequence[int]]
) -> np.ndarray:
    """Returns the bytes that all ranks send to this rank. `sizes[i][j]`: bytes from rank i to rank j."""
    count = len(ranks)
    mesh.require_links(ranks, all_pairs=True)
    out_bounds = bounds_of(sizes[me])
    in_bounds = bounds_of([row[me] for row in sizes])
    joined = memory.allocate_aligned(in_bounds[-1], np.dtype(np.uint8))
    _part(joined, in_bounds, me)[...] = _part(own_bytes, out_bounds, me)
    for shift in range(1, count):
        destination, source = (me + shift) % count, (me - shift) % count
        part = _part(joined, in_bounds, source)
        mesh.exchange(
            ranks[destination],
            [_part(own_bytes, out_bounds, destination)],
            ranks[source],
            part.nbytes,
            part,
        )
    return joined


def bounds_of(sizes: Sequence[int]) -> list[int]:
    """Returns the `[n + 1]` bounds of `n` consecutive parts with these sizes."""
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]


def _part(buffer: np.ndarray, bounds: Sequence[int], index: int) -> np.ndarray:
    return buffer[bounds[index] : bounds[index + 1]]


assert CHUNK % memory.ALIGNMENT == 0  # otherwise a chunk could end within an element
