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
_MOST_HEADER = 1 << 26
_AT_ONCE = 1 << 18
_LOOK_SECS = 0.002


class Lost(ConnectionError):
    """The other end of a connection is lost."""


def packed_message(header: dict[str, Any], *payload: Any) -> list[Any]:
    """Returns the buffers of a message in their order."""
    text = json.dumps(header, separators=(",", ":")).encode()
    buffers = [memoryview(part).cast("B") for part in payload if len(part)]
    size = sum(len(part) for part in buffers)
    return [_LENGTHS.pack(len(text), size) + text, *buffers]


class Inbox:
    """Buffer of received bytes, which splits them into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._memory = memoryview(bytearray(_AT_ONCE))

    def read(self, sock: socket.socket) -> None:
        """Reads available bytes from a socket. Raises Lost at the end of the connection."""
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
        """Yields all complete messages as (header, payload)."""
        start = 0
        try:
            while len(self._bytes) - start >= _LENGTHS.size:
                header_size, payload_size = _LENGTHS.unpack_from(self._bytes, start)
                if header_size > _MOST_HEADER:
                    raise Lost(f"a header of {header_size} bytes: not a message of ours")
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
    """One end of a blocking socket. Several threads may send.

    Attributes:
      bytes_sent: Size of all sent messages.
    """

    def __init__(self, sock: socket.socket):
        self.socket, self.bytes_sent = sock, 0
        self.inbox = Inbox()
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], *payload: Any) -> None:
        """Sends a message. Raises Lost if the other end is lost."""
        parts = packed_message(header, *payload)
        try:
            with self._sending:
                size = sum(map(len, parts))
                self.bytes_sent += size
                if size < _AT_ONCE:
                    self.socket.sendall(b"".join(parts))
                else:
                    for part in parts:
                        self.socket.sendall(part)
        except OSError as e:
            raise Lost(str(e)) from e

    def end(self) -> None:
        """Shuts the connection down after the sent bytes, which wakes a reading thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. Called after `end`, when no thread reads it."""
        self.socket.close()


def wait_until_received(sockets: Iterable[socket.socket], limit_secs: float) -> None:
    """Waits until the other ends have acknowledged all sent bytes, at most `limit_secs` seconds.

    The network of a container is removed at its end, together with unsent bytes.
    """
    deadline, waiting = time.monotonic() + limit_secs, list(sockets)
    while (waiting := [sock for sock in waiting if _has_unreceived(sock)]) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECS)


def _has_unreceived(sock: socket.socket) -> bool:
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
    """Queue of messages for a non-blocking socket. `bytes_sent` counts the bytes that were sent."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self._parts: deque[Any] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def put(self, header: dict[str, Any], *payload: Any) -> None:
        """Adds a message."""
        part = b"".join(packed_message(header, *payload))
        if self._parts and isinstance(self._parts[-1], bytearray) and len(self._parts[-1]) < _AT_ONCE:
            self._parts[-1] += part  # small messages are sent together
        else:
            self._parts.append(bytearray(part) if len(part) < _AT_ONCE else part)

    def write(self, sock: socket.socket) -> None:
        """Sends bytes until the socket would block. Raises Lost if the other end is lost."""
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
