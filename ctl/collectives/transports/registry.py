"""Registry of transports. One line registers a transport."""

import pkgutil

from ctl.collectives.transports.link import Transport

# data path -> "module:class"; a module is imported when its transport is created
_CLASSES = {
    "memory": "ctl.collectives.transports.shared_memory:MemoryTransport",
    "tcp": "ctl.collectives.transports.sockets:SocketTransport",
    "mpi": "ctl.collectives.transports.mpi:MpiTransport",
}


def create_transport(name: str) -> Transport:
    """Creates a transport.

    Args:
      name: "memory" for shared memory where it is possible, else sockets; "tcp" for sockets only; "mpi".

    Raises:
      UsageError: If the transport is not available in this process.
    """
    return pkgutil.resolve_name(_CLASSES[name])()
