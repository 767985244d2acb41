"""Exit barrier: the chief exits after all workers.

    all_reduce.sum([0.0])            # every worker has finished
    exit_barrier.arm(topology)       # at exit, the chief waits until the workers have ended

TensorFlow's coordination service runs in the chief. A worker that is still running when the chief ends
logs the chief as crashed, or is ended by the service. No error is logged if the workers end first.
"""

import atexit
import socket
import time

from ctl.collectives.transports import mpi
from ctl.distribute.topology import Topology

_LONGEST_SECS = 10.0
_POLL_SECS = 0.02
_CONNECT_SECS = 1.0
_peers: list[str] = []  # host:port of the workers that have not ended


def arm(topology: Topology) -> None:
    """Makes the chief wait at its exit for the workers. All workers have passed their last barrier."""
    if not topology.is_chief or topology.num_workers < 2:
        return
    atexit.unregister(_wait)
    atexit.register(_wait)
    _peers[:] = [a for rank, a in enumerate(topology.workers) if rank != topology.worker_index]


def disarm() -> None:
    """Cancels the wait when training continues: the workers do not end with this process then."""
    _peers.clear()


def _wait() -> None:
    mpi.finalize()  # the workers wait for it before they end
    until_secs = time.monotonic() + _LONGEST_SECS
    while _peers and time.monotonic() < until_secs:
        if _listens(_peers[0]):
            time.sleep(_POLL_SECS)
        else:
            _peers.pop(0)


def _listens(address: str) -> bool:
    """Returns True if the worker's server accepts connections, so that its process is still running."""
    host, _, port = address.rpartition(":")
    try:
        host_and_port = host.strip("[]"), int(port)
        socket.create_connection(host_and_port, timeout=_CONNECT_SECS).close()
    except (OSError, ValueError):
        return False
    return True
