"""Messages over a stream socket: a small JSON header and a binary payload."""

import contextlib
import fcntl
import json
import select
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

_LENGTHS = struct.Struct("<IQ")  # bytes of the header, bytes of the payload
_MAX_HEADER_BYTES = 1 << 26
_MAX_BATCH_BYTES = 1 << 18
_POLL_INTERVAL_SECS = 0.002


class Lost(ConnectionError):
    """Error of a connection that has failed or that the other end has closed."""


def pack_message(header: dict[str, Any], *payload: Any) -> list[Any]:
    """Returns the buffers of a message in the order in which they are sent."""
    text = json.dumps(header, separators=(",", ":")).encode()
    buffers = [memoryview(part).cast("B") for part in payload if len(part)]
    size = sum(len(part) for part in buffers)
    return [_LENGTHS.pack(len(text), size) + text, *buffers]


class Inbox:
    """Receive buffer that splits a byte stream into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._memory = memoryview(bytearray(_MAX_BATCH_BYTES))

    def read(self, sock: socket.socket) -> None:
        """Reads available bytes from a socket. Raises Lost if the connection has ended."""
        try:
            count = sock.recv_into(self._memory)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            raise Lost(str(e)) from e
        if not count:
            raise Lost("the connection was closed")
        self._bytes += self._memory[:count]

    def messages(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yields all complete messages as (header, payload) and removes them from the buffer."""
        start = 0
        try:
            while len(self._bytes) - start >= _LENGTHS.size:
                header_size, payload_size = _LENGTHS.unpack_from(self._bytes, start)
                if header_size > _MAX_HEADER_BYTES:
                    raise Lost(
                        f"received a header size of {header_size} bytes, which is not a message of ctl.hvd"
                    )
                payload_at = start + _LENGTHS.size + header_size
                end = payload_at + payload_size
                if len(self._bytes) < end:
                    return
                header = json.loads(self._bytes[start + _LENGTHS.size : payload_at])
                payload = bytes(memoryview(self._bytes)[payload_at:end])
                start = end
                yield header, payload
        finally:
            if start:
                del self._bytes[:start]


class Channel:
    """Message channel over a blocking socket. Several threads may send.

    Attributes:
      bytes_sent: Total size of the sent messages.
    """

    def __init__(self, sock: socket.socket):
        self.socket, self.bytes_sent = sock, 0
        self.inbox = Inbox()
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], *payload: Any) -> None:
        """Sends a message. Raises Lost if the connection has ended."""
        parts = pack_message(header, *payload)
        try:
            with self._sending:
                size = sum(map(len, parts))
                self.bytes_sent += size
                if size < _MAX_BATCH_BYTES:
                    self.socket.sendall(b"".join(parts))
                else:
                    for part in parts:
                        self.socket.sendall(part)
        except OSError as e:
            raise Lost(str(e)) from e

    def end(self) -> None:
        """Shuts down the connection after the sent bytes. A blocked reading thread resumes."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. Call `end` first, and wait until no thread reads from the socket."""
        self.socket.close()


def wait_until_received(sockets: Iterable[socket.socket], limit_secs: float) -> None:
    """Waits until the peers have acknowledged all sent bytes, at most `limit_secs` seconds.

    The network of a container is removed at its end, and bytes that are not sent yet are lost.
    """
    deadline, waiting = time.monotonic() + limit_secs, list(sockets)
    while (
        waiting := [sock for sock in waiting if _has_unacknowledged_bytes(sock)]
    ) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_SECS)


def _has_unacknowledged_bytes(sock: socket.socket) -> bool:
    try:
        poller = select.poll()
        poller.register(sock.fileno(), 0)
        if poller.poll(0):  # POLLHUP or POLLERR: the other end has closed
            return False
        (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # closed by this process
        return False
    return count > 0


class Outbox:
    """Queue of messages for a non-blocking socket.

    Attributes:
      bytes_sent: Number of bytes that the socket has accepted.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self._parts: deque[Any] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def put(self, header: dict[str, Any], *payload: Any) -> None:
        """Adds a message to the queue."""
        part = b"".join(pack_message(header, *payload))
        if (
            self._parts
            and isinstance(self._parts[-1], bytearray)
            and len(self._parts[-1]) < _MAX_BATCH_BYTES
        ):
            self._parts[-1] += part  # small messages are sent together
        else:
            self._parts.append(bytearray(part) if len(part) < _MAX_BATCH_BYTES else part)

    def write(self, sock: socket.socket) -> None:
        """Sends queued bytes until the socket would block. Raises Lost if the connection has ended."""
        while self._parts:
            part = self._parts[0]
            try:
                sent = sock.send(part)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as e:
                raise Lost(str(e)) from e
            self.bytes_sent += sent
            if sent < len(part):
                self._parts[0] = (
                    memoryview(bytes(part))[sent:] if isinstance(part, bytearray) else part[sent:]
                )
                return
            self._parts.popleft()
