"""Reduce-scatter of large tensors: on a ring, or by recursive halving with log2(n) exchanges."""

from collections.abc import Sequence

import numpy as np
from ctl.collectives import rings
from ctl.collectives.mesh import Mesh
from ctl.collectives.pairwise_reduction import PairwiseReduction, is_summed_wide
from ctl.collectives.transfer_costs import BYTE_SECS, HALVED_BYTE_SECS, ONE_MACHINE, NetworkCosts


def reduce_scatter(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    array: np.ndarray,
    sizes: Sequence[int],
    op: int,
    algorithm: str = "auto",
    network: NetworkCosts = ONE_MACHINE,
) -> np.ndarray:
    """Returns this rank's part of the reduced array. A mean is not divided.

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks in order.
      me: Index of this rank in `ranks`.
      array: Array `[n]` of this rank.
      sizes: Number of elements of the parts by rank, n in total.
      op: Operation of `arithmetic`.
      algorithm: "auto", "ring", or another name of `settings.COLLECTIVE_ALGORITHMS` for halving.
      network: Costs for "auto", the same on all ranks.
    """
    count = len(ranks)
    if algorithm == "auto":
        algorithm = select_reduce_scatter(
            count, array.nbytes, network, is_wide=is_summed_wide(array.dtype, op)
        )
    if algorithm == "ring" or count == 1:
        return rings.ring_reducescatter(mesh, ranks, me, array, sizes, op)
    joined, bounds = rings.JoinedArrays([array]), rings.bounds_of(sizes)
    PairwiseReduction(mesh, ranks, me, joined, op).scatter_by_halving(bounds)
    return joined.total[bounds[me] : bounds[me + 1]]


def select_reduce_scatter(
    count: int, num_bytes: int, network: NetworkCosts, *, is_wide: bool = False
) -> str:
    """Returns the algorithm with the shorter estimated time for `count` ranks with `num_bytes` each.

    Args:
      count: Number of ranks.
      num_bytes: Size of the array of each rank (bytes).
      network: Costs of the network.
      is_wide: True for sums of 16-bit floats, which halving sends as float32.
    """
    steps = count.bit_length() - 1
    has_folds = count != 1 << steps
    ring_secs = network.exchanges(count - 1, num_bytes * (count - 1) / count, BYTE_SECS)
    vectors = 1 - 2.0**-steps + has_folds * (1 + 1 / count)
    sent_bytes = vectors * num_bytes * (2 if is_wide else 1)  # a ring sends 16 bits
    halving_secs = network.exchanges(steps + 2 * has_folds, sent_bytes, HALVED_BYTE_SECS)
    return "halving" if halving_secs < ring_secs else "ring"
