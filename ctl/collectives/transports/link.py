"""Protocols of a link between two ranks and of a transport, which creates links.

Two ranks have a connected socket before they create a link. The lower rank sends an offer, such as the file
of its memory, and the higher rank sends an answer. Both then create their end of the link.

    links = connect_links(transport, rank, {peer: connection, ...})
"""

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from ctl.collectives.frames import Lost
from ctl.errors import UsageError

CHUNK = 1 << 19  # bytes that are passed to a consumer in one call; fits into the processor's cache
Consume = Callable[[int, np.ndarray], None]  # (offset in the message, received bytes)

_HELLO_BYTES = 512
_HELLO_SECS = 60.0


class Link(Protocol):
    """One end of a link. It sends one message and receives one message at a time.

    Both ends determine the sizes in advance. The caller (`Mesh`) polls the socket of the link.

    Attributes:
      path: Data path: "tcp", "memory" or "mpi".
      socket: Connection to the other end.
      needs_polling: True if `poll` transfers bytes that no event of the socket announces.
    """

    path: str
    socket: socket.socket
    needs_polling: bool

    @property
    def is_sent(self) -> bool:
        """True if the outgoing message has been sent."""

    @property
    def is_received(self) -> bool:
        """True if the incoming message is complete."""

    @property
    def needs_write(self) -> bool:
        """True if the socket should be polled for writing."""

    @property
    def needs_read(self) -> bool:
        """True if the socket should be polled for reading."""

    def send(self, views: Iterable[np.ndarray]) -> None:
        """Starts to send a message, the concatenation of arrays that must not change until `is_sent`."""

    def receive(self, size: int, into: np.ndarray | None, consume: Consume | None) -> None:
        """Starts to receive a message of `size` bytes into an array, or passes its chunks to `consume`."""

    def read(self) -> None:
        """Reads available bytes after an event of the socket. Raises Lost if the connection has ended."""

    def write(self) -> None:
        """Writes bytes after an event of the socket. Raises Lost if the connection has ended."""

    def poll(self) -> bool:
        """Transfers bytes without an event of the socket. Returns True if there were any."""

    def close(self) -> None:
        """Closes the connection."""


class Transport(Protocol):
    """Factory of the links of one rank. A file of this folder defines each kind.

    Attributes:
      path: Data path of its links. Both ranks of a pair need the same one, except that "memory" and "tcp"
        are compatible.
    """

    path: str

    def create_offer(self, peer: int) -> dict[str, Any]:
        """Returns the offer to a higher rank, as JSON values of at most 400 bytes."""

    def accept_offer(
        self, connection: socket.socket, peer: int, offer: dict[str, Any]
    ) -> tuple[Link, dict[str, Any]]:
        """Returns the link to a lower rank, and the answer to its offer."""

    def complete_offer(self, connection: socket.socket, peer: int, answer: dict[str, Any]) -> Link:
        """Returns the link to a higher rank after its answer."""

    def release_offers(self) -> None:
        """Releases resources of the offers, after all answers or an error."""

    def record_failure(self) -> None:
        """Records that a rank was lost. The end of the process must not wait for other ranks then."""


def connect_links(
    transport: Transport, rank: int, connections: Mapping[int, socket.socket]
) -> dict[int, Link]:
    """Creates the links of a rank. Blocks until the other ranks have called it.

    Args:
      transport: Kind of the links.
      rank: Rank of this process.
      connections: Other rank -> connected socket.

    Returns:
      Rank -> link.

    Raises:
      Lost: If a connection ends. The second argument is the rank.
      UsageError: If another rank uses an incompatible transport.
    """
    links: dict[int, Link] = {}
    higher_ranks = [peer for peer in connections if peer > rank]
    try:
        for peer in higher_ranks:
            _send_hello(connections[peer], transport.path, transport.create_offer(peer), peer)
        for peer in (peer for peer in connections if peer < rank):
            offer = _receive_hello(connections[peer], peer)
            if not _are_compatible(transport.path, offer):  # both ranks raise the error
                _send_hello(connections[peer], transport.path, {}, peer)
            _check_path(transport.path, offer, peer)
            links[peer], answer = transport.accept_offer(connections[peer], peer, offer)
            _send_hello(connections[peer], transport.path, answer, peer)
        for peer in higher_ranks:
            answer = _receive_hello(connections[peer], peer)
            _check_path(transport.path, answer, peer)
            links[peer] = transport.complete_offer(connections[peer], peer, answer)
    finally:
        transport.release_offers()
    return links


def _send_hello(sock: socket.socket, path: str, content: Mapping[str, Any], peer: int) -> None:
    try:
        sock.sendall(json.dumps({"path": path, **content}).encode().ljust(_HELLO_BYTES))
    except OSError as e:
        raise Lost(str(e), peer) from e


def _receive_hello(sock: socket.socket, peer: int) -> dict[str, Any]:
    received = b""
    sock.settimeout(_HELLO_SECS)
    try:
        while len(received) < _HELLO_BYTES:
            data = sock.recv(_HELLO_BYTES - len(received))
            if not data:
                raise Lost("the connection was closed", peer)
            received += data
    except OSError as e:
        raise Lost(str(e), peer) from e
    return json.loads(received)


def _are_compatible(path: str, hello: Mapping[str, Any]) -> bool:
    return "mpi" not in (path, hello["path"]) or path == hello["path"]


def _check_path(path: str, hello: Mapping[str, Any], peer: int) -> None:
    if not _are_compatible(path, hello):
        raise UsageError(
            f"rank {peer} sends data over {hello['path']!r}, and this rank over {path!r}; expected the "
            "same on all ranks. Start all ranks with the same --communication and CTL_COLLECTIVES."
        )
