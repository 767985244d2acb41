"""The chief leaves last.

    agreement.sum([0.0])             # every worker is done
    exit_barrier.arm(topology)       # at its end, the chief waits until the others are gone

TensorFlow's coordination service lives in the chief. A worker that is still there when the chief
ends logs it as crashed, or is ended by it; the other way round nothing is said.
"""

import atexit
import socket
import time

from ctl.distribute.topology import Topology

_LONGEST_SECS = 10.0
_POLL_SECS = 0.02
_CONNECT_SECS = 1.0
_peers: list[str] = []  # host:port of those that have still to leave


def arm(topology: Topology) -> None:
    """All workers have passed their last barrier: if this is the chief, its end waits for theirs."""
    if not topology.is_chief or topology.num_workers < 2:
        return
    atexit.unregister(_wait)
    atexit.register(_wait)
    _peers[:] = [a for rank, a in enumerate(topology.workers) if rank != topology.worker_index]


def disarm() -> None:
    """They train again: the end of this process says nothing about theirs."""
    _peers.clear()


def _wait() -> None:
    until_secs = time.monotonic() + _LONGEST_SECS
    while _peers and time.monotonic() < until_secs:
        if _listens(_peers[0]):
            time.sleep(_POLL_SECS)
        else:
            _peers.pop(0)


def _listens(address: str) -> bool:
    """Whether the worker's server still takes connections, and so its process lives."""
    host, _, port = address.rpartition(":")
    try:
        place = host.strip("[]"), int(port)
        socket.create_connection(place, timeout=_CONNECT_SECS).close()
    except (OSError, ValueError):
        return False
    return True
