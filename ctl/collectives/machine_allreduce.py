"""All-reduce in which one rank per machine exchanges with other machines.

1. The ranks of a machine reduce their vectors to its first rank, the leader, over shared memory.
2. The leaders reduce their vectors between the machines.
3. Each leader broadcasts the result within its machine.

The first step adds pairs of ranks, then pairs of pairs, as recursive doubling does. If every machine has
the same number of consecutive ranks, a power of two, and the leaders use recursive doubling, the result has
the bits of recursive doubling among all ranks.
"""

from collections.abc import Sequence

import numpy as np
from ctl.collectives import arithmetic, trees
from ctl.collectives.allreduce import allreduce
from ctl.collectives.machines import (
    MACHINES,
    Machines,
    are_tree_connected,
    costs_of_one_sender,
    find_machines,
    select_between_leaders,
    select_on_machines,
)
from ctl.collectives.mesh import Mesh
from ctl.collectives.pairwise_reduction import PairwiseReduction, is_summed_wide
from ctl.collectives.rings import JoinedArrays
from ctl.collectives.transfer_costs import ONE_MACHINE, NetworkCosts


def allreduce_on_machines(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    arrays: Sequence[np.ndarray],
    op: int,
    algorithm: str = "auto",
    network: NetworkCosts = ONE_MACHINE,
) -> list[np.ndarray]:
    """Like `allreduce.allreduce`, with the algorithm "machines".

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks in order.
      me: Index of this rank in `ranks`.
      arrays: Arrays `[n]` of one dtype, with the same sizes on all ranks.
      op: Operation of `arithmetic`.
      algorithm: One of `settings.COLLECTIVE_ALGORITHMS`, the same on all ranks.
      network: Measured costs, the same on all ranks.

    Returns:
      The reduced arrays, bitwise equal on all ranks.
    """
    machines = find_machines(mesh.machine_by_rank, tuple(ranks))
    leader_network = costs_of_one_sender(mesh.machine_by_rank, network)
    if algorithm == "auto" and machines.are_shared:
        num_bytes, is_wide = sum(a.nbytes for a in arrays), is_summed_wide(arrays[0].dtype, op)
        algorithm = select_on_machines(machines, num_bytes, leader_network, is_wide=is_wide)
    if algorithm != MACHINES:
        return allreduce(mesh, ranks, me, arrays, op, algorithm, network)
    return _reduce_by_machine(mesh, machines, ranks[me], arrays, op, leader_network)


def _reduce_by_machine(
    mesh: Mesh, machines: Machines, rank: int, arrays: Sequence[np.ndarray], op: int, network: NetworkCosts
) -> list[np.ndarray]:
    """Executes the algorithm "machines". `network` are the costs if one rank of each machine sends."""
    group = next(group for group in machines.groups if rank in group)
    if not are_tree_connected(len(mesh.machine_by_rank), group):
        mesh.require_links(group)
    joined, index = JoinedArrays(arrays), group.index(rank)
    vector = PairwiseReduction(mesh, group, index, joined, op).reduce_to_first()
    if not index:
        leaders = machines.leaders
        if len(leaders) > 1:
            mesh.require_links(leaders)
            between = select_between_leaders(machines, vector.nbytes, network)
            sum_op = arithmetic.SUM if op == arithmetic.AVERAGE else op  # the leaders are not all addends
            (vector,) = allreduce(mesh, leaders, leaders.index(rank), [vector], sum_op, between)
        _finish(joined, vector, op, machines.num_ranks)
    trees.broadcast_bytes(mesh, group, index, joined.total.view(np.uint8), 0)
    return joined.results()


def _finish(joined: JoinedArrays, vector: np.ndarray, op: int, count: int) -> None:
    """Writes the reduced vector of `count` ranks to the total, divided or rounded."""
    if is_summed_wide(joined.dtype, op):
        arithmetic.round_into(vector, joined.total)
        return
    if vector is not joined.total:
        joined.total[...] = vector
    if op == arithmetic.AVERAGE and arithmetic.engine_divides(joined.dtype):
        arithmetic.average_array(joined.total, count)
