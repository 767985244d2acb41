"""A port in use makes TensorFlow fail without naming it, and the peers wait for ever."""

import errno
import socket

from ctl.distribute.topology import Topology
from ctl.errors import UsageError


def check_port_is_free(cluster: Topology) -> None:
    """Raises UsageError if another process listens at this task's port."""
    if cluster.num_workers < 2 or cluster.address is None:
        return
    port = int(cluster.address.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                return
            raise UsageError(
                f"Port {port} of this task's address {cluster.address} is in use. Could not start "
                "gRPC server: end the other process, or write another port into TF_CONFIG of "
                "every worker."
            ) from None
