"""Messages over a connection whose other end is trusted: a JSON object per line.

line = JsonLines(connection)
line.send({"join": 40214})
line.receive()                      -> a dict; None when the other end is gone
"""

import contextlib
import json
import socket
import threading

MOST_BYTES = 2**20


class JsonLines:
    """One connection; `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, message: dict) -> bool:
        """Sends; False when the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(data)
            return True
        return False

    def receive(self) -> dict | None:
        """The next message; None at the end of the connection, or for what is none."""
        while b"\n" not in self._rest:
            try:
                data = self._connection.recv(65536)
            except OSError:
                data = b""
            if not data or len(self._rest) > MOST_BYTES:
                return None
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Ends the connection; a `receive` that waits returns None."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
