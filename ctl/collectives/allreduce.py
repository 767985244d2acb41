"""All-reduce of large tensors, and the selection of the fastest algorithm.

A ring takes 2 (n - 1) exchanges, recursive doubling log2(n) of the whole vector, recursive halving and
doubling 2 log2(n). With the last one a rank sends as many bytes as on a ring (`pairwise_reduction`).

The ranks of a group have the same result, bit by bit.
"""

import math
from collections.abc import Sequence

import numpy as np
from ctl.collectives import arithmetic
from ctl.collectives.mesh import Mesh
from ctl.collectives.pairwise_reduction import PairwiseReduction, is_summed_wide
from ctl.collectives.rings import JoinedArrays, ring_allreduce
from ctl.collectives.transfer_costs import BYTE_SECS, HALVED_BYTE_SECS, ONE_MACHINE, NetworkCosts

_RING, _DOUBLING, _HALVING = "ring", "doubling", "halving"
# per byte that a rank sends and receives; shortest on a ring: its parts stay in the processor's cache
_BYTE_SECS = {_RING: BYTE_SECS, _DOUBLING: 0.5e-9, _HALVING: HALVED_BYTE_SECS}


def allreduce(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    arrays: Sequence[np.ndarray],
    op: int,
    algorithm: str = "auto",
    network: NetworkCosts = ONE_MACHINE,
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
      network: Costs for "auto", the same on all ranks.
    """
    count = len(ranks)
    if algorithm == "auto":
        is_wide = is_summed_wide(arrays[0].dtype, op)
        algorithm = select_algorithm(count, sum(a.nbytes for a in arrays), network, is_wide=is_wide)
    if algorithm == _RING or count == 1:
        return ring_allreduce(mesh, ranks, me, arrays, op)
    joined = JoinedArrays(arrays)
    divides = op == arithmetic.AVERAGE and arithmetic.engine_divides(joined.dtype)
    reduction = PairwiseReduction(mesh, ranks, me, joined, op, divisor=count if divides else 1)
    if algorithm == _DOUBLING:
        reduction.reduce_by_doubling()
    else:
        reduction.reduce_by_halving()
    return joined.results()


def select_algorithm(
    count: int, num_bytes: int, network: NetworkCosts = ONE_MACHINE, *, is_wide: bool = False
) -> str:
    """Returns the algorithm with the shortest estimated time.

    Args:
      count: Number of ranks.
      num_bytes: Size of the vector of each rank (bytes).
      network: Costs of the network.
      is_wide: True for sums of 16-bit floats. Only a ring sends 16 bits; the other algorithms send float32
        before the result is complete.
    """
    if count <= 2:
        return _RING  # exchanges small vectors in one step
    steps = int(math.log2(count))
    folds = 0 if count == 1 << steps else 1
    addend = 2 if is_wide else 1  # size of an addend, in vectors
    exchanges_and_vectors = {
        _RING: (2 * (count - 1), 2 * (count - 1) / count),
        _DOUBLING: (steps + 2 * folds, steps * addend + folds * (addend + 1)),
        _HALVING: (2 * (steps + folds), (1 - 2.0**-steps + folds) * (addend + 1)),
    }
    return min(
        exchanges_and_vectors,
        key=lambda name: network.exchanges(
            exchanges_and_vectors[name][0], exchanges_and_vectors[name][1] * num_bytes, _BYTE_SECS[name]
        ),
    )
