"""Collectives of medium size with log2(n) exchanges, and their choice instead of a ring.

Broadcast uses a binomial tree. All-gather and all-to-all use the algorithms of Bruck et al., "Efficient
Algorithms for All-to-All Communications in Multiport Message-Passing Systems", 1997. They send the bytes of
several ranks in one message, so large tensors use the functions of `rings`, which copy less.

In all functions, `ranks` are the participating ranks in order, and `me` is the index of this rank in them.
Their number need not be a power of two.
"""

from collections.abc import Sequence

import numpy as np
from ctl.collectives import memory, rings
from ctl.collectives.mesh import Mesh
from ctl.collectives.transfer_costs import BYTE_SECS, COPIED_BYTE_SECS, ONE_MACHINE, NetworkCosts


def broadcast_bytes(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    buffer: np.ndarray,
    root: int,
    algorithm: str = "auto",
    network: NetworkCosts = ONE_MACHINE,
) -> None:
    """Copies the bytes of `buffer` on the root to `buffer` on all ranks.

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks in order.
      me: Index of this rank in `ranks`.
      buffer: Bytes `[n]`.
      root: Index of the root in `ranks`.
      algorithm: "auto", "ring", or another name of `settings.COLLECTIVE_ALGORITHMS` for the tree.
      network: Costs for "auto", the same on all ranks.
    """
    if algorithm == "auto":
        num_pieces = max(1, -(-buffer.size // rings.PIECE))
        chain_steps, tree_steps = len(ranks) - 2 + num_pieces, _log2(len(ranks))
        chain_secs = network.exchanges(chain_steps, chain_steps * buffer.size / num_pieces, BYTE_SECS)
        tree_secs = network.exchanges(tree_steps, tree_steps * buffer.size, BYTE_SECS)
        algorithm = "ring" if chain_secs <= tree_secs else "tree"
    if algorithm == "ring":
        rings.ring_broadcast(mesh, ranks, me, buffer, root)
    else:
        tree_broadcast(mesh, ranks, me, buffer, root)


def allgather_bytes(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    own_bytes: np.ndarray,
    sizes: Sequence[int],
    algorithm: str = "auto",
    network: NetworkCosts = ONE_MACHINE,
) -> np.ndarray:
    """Returns the concatenated bytes of all ranks in order.

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks in order.
      me: Index of this rank in `ranks`.
      own_bytes: Bytes `[sizes[me]]` of this rank.
      sizes: Number of bytes by rank.
      algorithm: "auto", "ring", or another name of `settings.COLLECTIVE_ALGORITHMS`.
      network: Costs for "auto", the same on all ranks.
    """
    if algorithm == "auto":
        saved_secs = network.exchanges(len(ranks) - 1 - _log2(len(ranks)), 0, 0.0)
        algorithm = "ring" if sum(sizes) * COPIED_BYTE_SECS >= saved_secs else "tree"
    function = rings.ring_allgather if algorithm == "ring" else bruck_allgather
    return function(mesh, ranks, me, own_bytes, sizes)


def alltoall_bytes(
    mesh: Mesh,
    ranks: Sequence[int],
    me: int,
    own_bytes: np.ndarray,
    sizes: Sequence[Sequence[int]],
    algorithm: str = "auto",
    network: NetworkCosts = ONE_MACHINE,
) -> np.ndarray:
    """Returns the bytes that all ranks send to this rank.

    Args:
      mesh: Links to the other ranks.
      ranks: Participating ranks in order.
      me: Index of this rank in `ranks`.
      own_bytes: Bytes to send, in the order of the ranks.
      sizes: `sizes[i][j]` is the number of bytes from rank i to rank j.
      algorithm: "auto", "ring", or another name of `settings.COLLECTIVE_ALGORITHMS`.
      network: Costs for "auto", the same on all ranks.
    """
    if algorithm == "auto":
        count, num_steps = len(ranks), _log2(len(ranks))
        num_bytes = sum(map(sum, sizes)) / count  # of a rank; a step of the tree sends half
        ring_secs = network.exchanges(count - 1, num_bytes * (count - 1) / count, BYTE_SECS)
        tree_secs = network.exchanges(num_steps, num_bytes * num_steps / 2, BYTE_SECS + COPIED_BYTE_SECS)
        algorithm = "ring" if ring_secs <= tree_secs else "tree"
    function = rings.ring_alltoall if algorithm == "ring" else bruck_alltoall
    return function(mesh, ranks, me, own_bytes, sizes)


def tree_broadcast(mesh: Mesh, ranks: Sequence[int], me: int, buffer: np.ndarray, root: int) -> None:
    """Like `rings.ring_broadcast`, but each rank that has the bytes sends them to another one."""
    count = len(ranks)
    position = (me - root) % count
    distance = 1
    while distance < count and not position & distance:
        distance *= 2
    if position:
        source = ranks[(me - distance) % count]
        mesh.exchange(source, [], source, buffer.nbytes, buffer)
    while distance > 1:
        distance //= 2
        if position + distance < count:
            destination = ranks[(me + distance) % count]
            mesh.exchange(destination, [buffer], destination, 0)


def bruck_allgather(
    mesh: Mesh, ranks: Sequence[int], me: int, own_bytes: np.ndarray, sizes: Sequence[int]
) -> np.ndarray:
    """Like `rings.ring_allgather`, but the number of gathered blocks doubles with each exchange."""
    count = len(ranks)
    order = [(me + i) % count for i in range(count)]  # of the blocks in `gathered`
    bounds = rings.bounds_of([sizes[i] for i in order])
    gathered = np.empty(bounds[-1], np.uint8)
    gathered[: own_bytes.size] = own_bytes
    distance = 1
    while distance < count:
        num_blocks = min(distance, count - distance)
        destination, source = ranks[(me - distance) % count], ranks[(me + distance) % count]
        target = gathered[bounds[distance] : bounds[distance + num_blocks]]
        mesh.exchange(destination, [gathered[: bounds[num_blocks]]], source, target.nbytes, target)
        distance *= 2
    joined = memory.allocate_aligned(bounds[-1], np.dtype(np.uint8))
    num_first = bounds[-1] - bounds[count - me]  # bytes of the ranks before this one
    joined[:num_first] = gathered[bounds[count - me] :]
    joined[num_first:] = gathered[: bounds[count - me]]
    return joined


def bruck_alltoall(
    mesh: Mesh, ranks: Sequence[int], me: int, own_bytes: np.ndarray, sizes: Sequence[Sequence[int]]
) -> np.ndarray:
    """Like `rings.ring_alltoall`, but a block travels over the ranks at the powers of two of its distance.

    Block i is for the rank i places after the one that has sent it. After the exchange with a `distance`, a
    rank has the blocks that have travelled the bits of i up to `distance`.
    """
    count = len(ranks)
    out_bounds = rings.bounds_of(sizes[me])
    blocks = []
    for i in range(count):
        destination = (me + i) % count
        blocks.append(own_bytes[out_bounds[destination] : out_bounds[destination + 1]])
    distance = 1
    while distance < count:
        moved = [i for i in range(count) if i & distance]
        senders = [(me - (i & (2 * distance - 1))) % count for i in moved]
        incoming = [sizes[sender][(sender + i) % count] for sender, i in zip(senders, moved, strict=True)]
        bounds = rings.bounds_of(incoming)
        target = np.empty(bounds[-1], np.uint8)
        destination, source = ranks[(me + distance) % count], ranks[(me - distance) % count]
        mesh.exchange(destination, [blocks[i] for i in moved], source, target.nbytes, target)
        for j, i in enumerate(moved):
            blocks[i] = target[bounds[j] : bounds[j + 1]]
        distance *= 2
    joined = memory.allocate_aligned(sum(block.size for block in blocks), np.dtype(np.uint8))
    start = 0
    for sender in range(count):
        block = blocks[(me - sender) % count]
        joined[start : start + block.size] = block
        start += block.size
    return joined


def _log2(count: int) -> int:
    """Returns the logarithm of the number of ranks, rounded up."""
    return (count - 1).bit_length()
