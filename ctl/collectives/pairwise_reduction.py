"""Reductions by exchanges between ranks with a distance of 1, 2, 4 and so on.

Recursive doubling takes log2(n) exchanges of the whole vector. Recursive halving takes log2(n) exchanges of
a half, a quarter and so on, after which each rank has one part of the result. Recursive doubling of these
parts completes an all-reduce.

Source: Rabenseifner, "Optimization of Collective Reduction Operations", 2004.

If the number of ranks is not a power of two, some ranks send their vector to the next rank before the other
steps, and receive the result after them.

Two ranks that reduce the same elements do so in the same order.
"""

from collections.abc import Sequence

import numpy as np
from ctl.collectives import arithmetic, memory
from ctl.collectives.mesh import Mesh
from ctl.collectives.partners import active_rank
from ctl.collectives.rings import JoinedArrays
from ctl.collectives.transports.link import Consume


class PairwiseReduction:
    """One reduction of the vectors of several ranks.

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks in order.
      me: Index of this rank in `ranks`.
      joined: Arrays and total. The total is the result.
      op: Operation of `arithmetic`.
      divisor: The result is divided by this number.
    """

    def __init__(
        self, mesh: Mesh, ranks: Sequence[int], me: int, joined: JoinedArrays, op: int, divisor: int = 1
    ):
        self._mesh, self._ranks, self._me, self._op = mesh, ranks, me, op
        self._joined, self._total, self._divisor = joined, joined.total, divisor
        self._num_active = 1 << (len(ranks).bit_length() - 1)  # ranks that execute the steps
        self._num_folds = len(ranks) - self._num_active
        self._is_wide = is_summed_wide(joined.dtype, op)
        self._values = self._own_vector()

    def reduce_by_doubling(self) -> None:
        """Reduces the whole vector on every rank."""
        if self._fold():
            self._receive(0, self._total.size)
            return
        distance, received = 1, memory.allocate_aligned(self._values.size, self._values.dtype)
        while distance < self._num_active:
            partner = self._index ^ distance
            consume = self._consumer(self._values, received, is_own_first=self._index < partner)
            self._exchange(partner, self._values, self._values.nbytes, consume)
            self._values, received = received, self._values
            distance *= 2
        self._finish(0, self._values.size)
        self._unfold(0, self._total.size)

    def reduce_by_halving(self) -> None:
        """Reduces one part of the vector on every active rank, and gathers the parts."""
        if self._fold():
            self._receive(0, self._total.size)
            return
        bounds = self._joined.bounds(self._num_active)
        self._halve(bounds)
        distance = 1
        while distance < self._num_active:
            partner = self._index ^ distance
            start = (partner // distance) * distance
            part = self._total[bounds[start] : bounds[start + distance]]
            own_start = (self._index // distance) * distance
            outgoing = self._total[bounds[own_start] : bounds[own_start + distance]]
            self._exchange(partner, outgoing, part.nbytes, target=part)
            distance *= 2
        self._unfold(0, self._total.size)

    def scatter_by_halving(self, bounds: Sequence[int]) -> None:
        """Reduces part i of the vector on rank i. Other parts of the total are undefined.

        Args:
          bounds: Bounds of the parts (elements), one more than ranks.
        """
        if self._fold():
            self._receive(bounds[self._me], bounds[self._me + 1])
            return
        num_folded = 2 * self._num_folds  # an active rank has the parts of both ranks of a fold
        self._halve([*bounds[:num_folded:2], *bounds[num_folded:]])
        if self._me < num_folded:
            self._unfold(bounds[self._me - 1], bounds[self._me])

    def reduce_to_first(self) -> np.ndarray:
        """Reduces the whole vector on the first rank. The total is not written, or has undefined values.

        With 2^k ranks the order of the additions is that of `reduce_by_doubling`.

        Returns:
          On the first rank the reduced vector, undivided, as float32 for sums of 16-bit floats. It may be
          the total. On other ranks a vector with undefined values.
        """
        distance, count = 1, len(self._ranks)
        while distance < count and not self._me & distance:
            if self._me + distance < count:
                other = self._ranks[self._me + distance]
                consume = self._consumer(self._values, self._values, is_own_first=True)
                self._mesh.exchange(other, [], other, self._values.nbytes, consume=consume)
            distance *= 2
        if self._me:
            other = self._ranks[self._me - distance]
            self._mesh.exchange(other, [self._values], other, 0)
        return self._values

    def _halve(self, bounds: Sequence[int]) -> None:
        """Reduces part i of the vector on active rank i. The parts have these bounds (elements)."""
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

    def _own_vector(self) -> np.ndarray:
        """Copies the arrays of this rank to the total, or to a new vector of float32 if `_is_wide`."""
        if self._is_wide:
            return self._joined.widened(0, self._total.size)
        self._joined.fill_total()
        return self._total

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
          True if this rank is not active. It has to receive its result.
        """
        if self._me >= 2 * self._num_folds:
            return False
        is_active = self._me % 2 == 1
        other = self._ranks[self._me - 1 if is_active else self._me + 1]
        if is_active:
            consume = self._consumer(self._values, self._values, is_own_first=False)
            self._mesh.exchange(other, [], other, self._values.nbytes, consume=consume)
        else:
            self._mesh.exchange(other, [self._values], other, 0)
        return not is_active

    def _unfold(self, low: int, high: int) -> None:
        """Sends a part of the result to the rank that has sent its vector in `_fold`."""
        if self._me < 2 * self._num_folds:
            other = self._ranks[self._me - 1]
            self._mesh.exchange(other, [self._total[low:high]], other, 0)

    def _receive(self, low: int, high: int) -> None:
        """Receives the part of the result that the next rank sends in `_unfold`."""
        other, part = self._ranks[self._me + 1], self._total[low:high]
        self._mesh.exchange(other, [], other, part.nbytes, part)

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


def is_summed_wide(dtype: np.dtype, op: int) -> bool:
    """Returns True for sums of 16-bit floats. They are computed in float32 and rounded once."""
    return op in (arithmetic.SUM, arithmetic.AVERAGE) and arithmetic.is_half(dtype)
