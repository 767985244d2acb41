"""Check that the port of this task is free.

If it is in use, TensorFlow fails without naming the port, and the peers wait without a timeout.
"""

import errno
import socket

from ctl.distribute.topology import Topology
from ctl.errors import EXIT_RETRY, UsageError


class StepPortInUseError(UsageError):
    """A computed port of a job step is in use. The next step has other ports."""

    exit_code = EXIT_RETRY


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
            raise port_error(cluster) from None


def port_error(cluster: Topology) -> UsageError:
    """Returns the error for a port of this task that another process uses."""
    address = cluster.address or ""
    text = f"Port {address.rpartition(':')[2]} of this task's address {address} is in use"
    if cluster.port_variable == "TF_CONFIG":
        return UsageError(
            f"{text}. Could not start gRPC server. End the other process, or write another port into "
            "TF_CONFIG of every worker."
        )
    name = cluster.port_variable
    advice = f"set {name} to the first of {cluster.num_workers} free ports, the same for all tasks"
    if cluster.ports_change:
        return StepPortInUseError(f"{text}. Start the step again, which has other ports, or {advice}.")
    return UsageError(f"{text}; expected a free port. End the other process, or {advice}.")
