"""Messages over an authenticated connection, with one JSON object per line.

messages = JsonLines(connection)
messages.send({"join": 40214})
messages.receive()                  # a dictionary; None if the connection is closed
"""

import contextlib
import json
import socket
import threading

from ctl.io import tcp_options

MAX_MESSAGE_BYTES = 2**20


class JsonLines:
    """A connection for JSON objects. Several threads may call `send`, only one may call `receive`.

    Args:
      connection: A blocking socket.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._buffer = b""
        self._lock = threading.Lock()

    def send(self, message: dict) -> bool:
        """Sends a message. Returns False if the connection is closed."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(data)
            return True
        return False

    def receive(self) -> dict | None:
        """Blocks until the next message. Returns None if the connection is closed or it is invalid."""
        while b"\n" not in self._buffer:
            try:
                data = self._connection.recv(65536)
            except OSError:
                data = b""
            if not data or len(self._buffer) > MAX_MESSAGE_BYTES:
                return None
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def set_peer_timeout(self, timeout_secs: float) -> None:
        """Ends a connection over a cut link after this time; see `tcp_options.set_peer_timeout`."""
        tcp_options.set_peer_timeout(self._connection, timeout_secs)

    def close(self) -> None:
        """Closes the connection. A `receive` in progress returns None."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
