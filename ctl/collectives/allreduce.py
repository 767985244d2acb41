"""All-reduce of large tensors: two algorithms, and the selection of the fastest of three.

Recursive doubling takes log2(n) exchanges of the whole vector. Recursive halving and doubling takes
2 log2(n) exchanges, and a rank sends as many bytes as on a ring, which takes 2 (n - 1) exchanges. Source:
Rabenseifner, "Optimization of Collective Reduction Operations", 2004.

If the number of ranks is not a power of two, some ranks send their vector to the next rank before the other
steps, and receive the result after them.

The ranks of a group have the same result, bit by bit: two ranks that reduce the same elements do so in the
same order.
"""

import math
from collections.abc import Sequence

import numpy as np
from ctl.collectives import arithmetic
from ctl.collectives.mesh import Mesh
from ctl.collectives.partners import active_rank
from ctl.collectives.rings import JoinedArrays, ring_allreduce
from ctl.collectives.transfer_costs import BYTE_SECS, EXCHANGE_SECS
from ctl.collectives.transports.link import Consume

_RING, _DOUBLING, _HALVING = "ring", "doubling", "halving"
# per byte that a rank sends and receives; shortest on a ring: its parts stay in the processor's cache
_BYTE_SECS = {_RING: BYTE_SECS, _DOUBLING: 0.5e-9, _HALVING: 0.3e-9}


def allreduce(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    arrays: Sequence[np.ndarray],
    op: int,
    algorithm: str = "auto",
) -> list[np.ndarray]:
    """Returns the reduced arrays, which are bitwise equal on all ranks.

    AVERAGE divides by the number of ranks if `arithmetic.engine_divides` is True for the dtype. Otherwise
    it returns the sum.

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks in order.
      me: Index of this rank in `ranks`.
      arrays: Arrays `[n]` of one dtype, with the same sizes on all ranks.
      op: Operation of `arithmetic`.
      algorithm: One of `settings.COLLECTIVE_ALGORITHMS`, the same on all ranks.
    """
    count = len(ranks)
    if algorithm == "auto":
        algorithm = select_algorithm(count, sum(array.nbytes for array in arrays))
    if algorithm == _RING or count == 1:
        return ring_allreduce(mesh, ranks, me, arrays, op)
    joined = JoinedArrays(arrays)
    reduction = _Reduction(mesh, ranks, me, joined, op)
    if algorithm == _DOUBLING:
        reduction.reduce_by_doubling()
    else:
        reduction.reduce_by_halving()
    return joined.results()


def select_algorithm(count: int, num_bytes: int) -> str:
    """Returns the algorithm with the shortest estimated time for `count` ranks with `num_bytes` each."""
    if count <= 2:
        return _RING  # exchanges small vectors in one step
    steps = int(math.log2(count))
    folds = 0 if count == 1 << steps else 2
    exchanges_and_vectors = {
        _RING: (2 * (count - 1), 2 * (count - 1) / count),
        _DOUBLING: (steps + folds, steps + folds),
        _HALVING: (2 * steps + folds, 2 * (1 - 2.0**-steps) + folds),
    }
    return min(
        exchanges_and_vectors,
        key=lambda name: (
            exchanges_and_vectors[name][0] * EXCHANGE_SECS
            + exchanges_and_vectors[name][1] * num_bytes * _BYTE_SECS[name]
        ),
    )


class _Reduction:
    """One all-reduce by exchanges between ranks with a distance of 1, 2, 4 and so on.

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks in order.
      me: Index of this rank in `ranks`.
      joined: Arrays and total. The total is the result.
      op: Operation of `arithmetic`.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], me: int, joined: JoinedArrays, op: int):
        self._mesh, self._ranks, self._me, self._op = mesh, ranks, me, op
        self._joined, self._total = joined, joined.total
        self._num_active = 1 << (len(ranks).bit_length() - 1)  # ranks that execute the steps
        self._num_folds = len(ranks) - self._num_active
        is_sum = op in (arithmetic.SUM, arithmetic.AVERAGE)
        self._is_wide = is_sum and arithmetic.is_half(joined.dtype)  # summed in float32, rounded once
        divides = op == arithmetic.AVERAGE and arithmetic.engine_divides(joined.dtype)
        self._divisor = len(ranks) if divides else 1
        self._values = self._own_vector()

    def reduce_by_doubling(self) -> None:
        """Reduces the whole vector on every rank."""
        if self._fold():
            return
        distance, received = 1, np.empty_like(self._values)
        while distance < self._num_active:
            partner = self._index ^ distance
            consume = self._consumer(self._values, received, is_own_first=self._index < partner)
            self._exchange(partner, self._values, self._values.nbytes, consume)
            self._values, received = received, self._values
            distance *= 2
        self._finish(0, self._values.size)
        self._unfold()

    def reduce_by_halving(self) -> None:
        """Reduces one part of the vector on every active rank, and gathers the parts."""
        if self._fold():
            return
        bounds = self._joined.bounds(self._num_active)
        first, last, distance = 0, self._num_active, self._num_active // 2
        while distance:  # the parts from `first` to `last` of this rank contain more and more addends
            middle, partner = first + distance, self._index ^ distance
            is_lower = self._index < partner
            outgoing = self._values[bounds[middle] : bounds[last]]
            reduced = self._values[bounds[first] : bounds[middle]]
            if not is_lower:
                outgoing, reduced = reduced, outgoing
            self._exchange(
                partner, outgoing, reduced.nbytes, self._consumer(reduced, reduced, is_own_first=is_lower)
            )
            first, last = (first, middle) if is_lower else (middle, last)
            distance //= 2
        self._finish(bounds[first], bounds[last])
        distance = 1
        while distance < self._num_active:
            partner = self._index ^ distance
            start = (partner // distance) * distance
            part = self._total[bounds[start] : bounds[start + distance]]
            own_start = (self._index // distance) * distance
            outgoing = self._total[bounds[own_start] : bounds[own_start + distance]]
            self._exchange(partner, outgoing, part.nbytes, target=part)
            distance *= 2
        self._unfold()

    def _own_vector(self) -> np.ndarray:
        """Copies the arrays of this rank to the total, or to a new vector of float32 if `_is_wide`."""
        values = np.empty(self._total.size, np.float32) if self._is_wide else self._total
        start = 0
        for view in self._joined.views(0, self._total.size):
            end = start + view.size
            values[start:end] = arithmetic.to_float32(view) if self._is_wide else view
            start = end
        return values

    @property
    def _index(self) -> int:
        """Index of this rank among the active ranks."""
        return self._me // 2 if self._me < 2 * self._num_folds else self._me - self._num_folds

    def _exchange(
        self,
        partner: int,
        outgoing: np.ndarray,
        size: int,
        consume: Consume | None = None,
        target: np.ndarray | None = None,
    ) -> None:
        """Exchanges vectors with the active rank of this index. See `Mesh.exchange`."""
        other = self._ranks[active_rank(partner, len(self._ranks))]
        self._mesh.exchange(other, [outgoing], other, size, target, consume)

    def _fold(self) -> bool:
        """Moves the vectors of ranks that are not active to the next rank.

        Returns:
          True if this rank is not active. Its total is then complete.
        """
        if self._me >= 2 * self._num_folds:
            return False
        is_active = self._me % 2 == 1
        other = self._ranks[self._me - 1 if is_active else self._me + 1]
        if is_active:
            consume = self._consumer(self._values, self._values, is_own_first=False)
            self._mesh.exchange(other, [], other, self._values.nbytes, consume=consume)
            return False
        self._mesh.exchange(other, [self._values], other, 0)
        self._mesh.exchange(other, [], other, self._total.nbytes, self._total)
        return True

    def _unfold(self) -> None:
        """Sends the result to the rank that has sent its vector in `_fold`."""
        if self._me < 2 * self._num_folds:
            other = self._ranks[self._me - 1]
            self._mesh.exchange(other, [self._total], other, 0)

    def _consumer(self, values: np.ndarray, out: np.ndarray, *, is_own_first: bool) -> Consume:
        """Creates a consumer that writes `values op received` to `out`, which may be `values`."""

        def consume(offset: int, chunk: np.ndarray) -> None:
            received = chunk.view(out.dtype)
            low = offset // out.itemsize
            part = slice(low, low + received.size)
            operands = (values[part], received) if is_own_first else (received, values[part])
            arithmetic.reduce_to(out[part], self._op, *operands)

        return consume

    def _finish(self, low: int, high: int) -> None:
        """Writes the elements from `low` to `high` to the total, divided or rounded."""
        values, out = self._values[low:high], self._total[low:high]
        if self._is_wide:
            arithmetic.round_into(values, out)
        else:
            if self._values is not self._total:
                out[...] = values
            arithmetic.average_array(out, self._divisor)
