"""Options of the TCP connections between the processes of a job."""

import contextlib
import socket

PEER_TIMEOUT_SECS = 60.0


def set_tcp_options(connection: socket.socket) -> socket.socket:
    """Disables delays of small messages and enables the detection of a dead peer within a minute.

    Args:
      connection: A connected TCP socket.

    Returns:
      The same socket.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": int(1000 * PEER_TIMEOUT_SECS),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
