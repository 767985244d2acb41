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
    _set_timeouts(connection, PEER_TIMEOUT_SECS, idle_secs=10, interval_secs=5)
    return connection


def set_peer_timeout(connection: socket.socket, timeout_secs: float) -> None:
    """Sets the time after which the kernel ends a connection to a dead peer or over a cut link.

    A peer that is only stopped does not end the connection, because its kernel answers.

    Args:
      connection: A socket with the options of `set_tcp_options`.
      timeout_secs: Time without an answer of the peer's kernel, at most `PEER_TIMEOUT_SECS` (seconds).
    """
    timeout_secs = min(timeout_secs, PEER_TIMEOUT_SECS)
    interval_secs = max(1, int(timeout_secs / 4))
    _set_timeouts(connection, timeout_secs, idle_secs=interval_secs, interval_secs=interval_secs)


def _set_timeouts(
    connection: socket.socket, timeout_secs: float, *, idle_secs: int, interval_secs: int
) -> None:
    options = {
        "TCP_KEEPIDLE": idle_secs,
        "TCP_KEEPINTVL": interval_secs,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": int(1000 * timeout_secs),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
