"""Transport over connected sockets."""

import socket
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from ctl.collectives.frames import Lost
from ctl.collectives.transports.link import CHUNK, Consume, Link

_MAX_VIEWS = 64  # per system call


class SocketLink:
    """A link over a connected socket.

    Args:
      sock: The socket, which becomes non-blocking.
      rank: Rank of the other end, for errors.
    """

    path, needs_polling = "tcp", False

    def __init__(self, sock: socket.socket, rank: int):
        self.socket = sock
        self._rank = rank
        self._views: deque[memoryview] = deque()
        self._consume: Consume | None = None
        self._target = memoryview(b"")
        self._received = self._size = self._filled = 0
        self._scratch = np.empty(0, np.uint8)
        sock.setblocking(False)

    @property
    def is_sent(self) -> bool:
        """True if the outgoing message has been sent."""
        return not self._views

    @property
    def is_received(self) -> bool:
        """True if the incoming message is complete."""
        return self._received == self._size

    @property
    def needs_write(self) -> bool:
        """True if the socket should be polled for writing."""
        return bool(self._views)

    @property
    def needs_read(self) -> bool:
        """True if the socket should be polled for reading."""
        return self._received < self._size

    def send(self, views: Iterable[np.ndarray]) -> None:
        """Starts to send a message, the concatenation of arrays that must not change until `is_sent`."""
        self._views = deque(_to_memoryview(view) for view in views if view.size)
        if self._views:
            self.write()

    def receive(self, size: int, into: np.ndarray | None, consume: Consume | None) -> None:
        """Starts to receive a message of `size` bytes into an array, or passes its chunks to `consume`."""
        self._received, self._filled, self._size, self._consume = 0, 0, size, consume
        if consume is not None and not self._scratch.size and size:
            self._scratch = np.empty(CHUNK, np.uint8)
        self._target = memoryview(b"") if into is None else _to_memoryview(into)

    def read(self) -> None:
        """Reads all available bytes. Raises Lost if the connection has ended."""
        while self._received < self._size:
            if self._consume is None:
                buffer = self._target[self._received :]
            else:
                end = min(CHUNK, self._size - self._received + self._filled)
                buffer = self._scratch.data[self._filled : end]
            count = self._receive_into(buffer)
            if not count:
                return
            if self._consume is None:
                self._received += count
                continue
            self._filled += count
            self._received += count
            if self._filled == CHUNK or self._received == self._size:
                self._consume(self._received - self._filled, self._scratch[: self._filled])
                self._filled = 0

    def write(self) -> None:
        """Writes until the socket would block. Raises Lost if the connection has ended."""
        while self._views:
            first_views = [self._views[i] for i in range(min(len(self._views), _MAX_VIEWS))]
            try:
                count = self.socket.sendmsg(first_views)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as e:
                raise Lost(str(e), self._rank) from e
            while count and count >= len(self._views[0]):
                count -= len(self._views.popleft())
            if count:
                self._views[0] = self._views[0][count:]

    def poll(self) -> bool:
        """Returns False: events of the socket announce all bytes."""
        return False

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()

    def _receive_into(self, buffer: memoryview) -> int:
        """Returns the number of received bytes, or 0 if the socket would block."""
        try:
            count = self.socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as e:
            raise Lost(str(e), self._rank) from e
        if not count:
            raise Lost("the connection was closed", self._rank)
        return count


class SocketTransport:
    """Factory of links over sockets. A `Transport`."""

    path = "tcp"

    def create_offer(self, peer: int) -> dict[str, Any]:
        """Returns an empty offer."""
        return {}

    def accept_offer(
        self, connection: socket.socket, peer: int, offer: dict[str, Any]
    ) -> tuple[Link, dict[str, Any]]:
        """Returns a link and an answer without content."""
        return SocketLink(connection, peer), {}

    def complete_offer(self, connection: socket.socket, peer: int, answer: dict[str, Any]) -> Link:
        """Returns a link."""
        return SocketLink(connection, peer)

    def release_offers(self) -> None:
        """Does not release resources: offers have none."""

    def record_failure(self) -> None:
        """Does not record the failure: the end of the process does not wait for other ranks."""


def _to_memoryview(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data if array.size else memoryview(b"")
