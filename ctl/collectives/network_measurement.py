"""Measurement of the connections between machines, from which the ranks select algorithms."""

import time

import numpy as np
from ctl.collectives.mesh import Mesh
from ctl.collectives.ranks import Ranks
from ctl.collectives.transfer_costs import BYTE_SECS, EXCHANGE_SECS, ONE_MACHINE, NetworkCosts

_NUM_SMALL, _NUM_LARGE = 6, 3  # exchanges with each partner; the fastest one counts
_LARGE_BYTES = 256 << 10


def measure_network(mesh: Mesh, ranks: Ranks) -> NetworkCosts:
    """Returns the costs of the slowest connections of this rank. All ranks call it at the same time.

    Each rank exchanges messages with the ranks at a distance of 1, 2, 4 and so on, while all others do the
    same, as in a collective. The costs of ranks on one machine are constants, without a measurement.

    Args:
      mesh: Links to the partners of this rank.
      ranks: Ranks of this process.

    Raises:
      Lost: If a connection ends. The second argument is the rank.
    """
    if len({address.rpartition(":")[0] for address in ranks.addresses}) == 1:
        return ONE_MACHINE
    latency_secs = byte_secs = 0.0
    distance = 1
    while distance < ranks.size:
        small_secs = _fastest_exchange(mesh, ranks, distance, 1, _NUM_SMALL)
        large_secs = _fastest_exchange(mesh, ranks, distance, _LARGE_BYTES, _NUM_LARGE)
        latency_secs = max(latency_secs, small_secs - EXCHANGE_SECS)
        byte_secs = max(byte_secs, (large_secs - small_secs) / _LARGE_BYTES - BYTE_SECS)
        distance *= 2
    return NetworkCosts(latency_secs, byte_secs)


def _fastest_exchange(mesh: Mesh, ranks: Ranks, distance: int, num_bytes: int, count: int) -> float:
    """Returns the shortest of `count` exchanges of messages of this size (seconds)."""
    sent, received = np.zeros(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    destination, source = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
    durations = []
    for _ in range(count):
        start_secs = time.perf_counter()
        mesh.exchange(destination, [sent], source, num_bytes, received)
        durations.append(time.perf_counter() - start_secs)
    return min(durations)
