"""Exchange of large tensors between ranks: each rank sends to one rank while it receives from another."""

import json
import mmap
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ctl.collectives.frames import Lost
from ctl.collectives.links import Consume, Link, MemoryLink, SharedMemory, SocketLink, opened_memory
from ctl.collectives.settings import Settings

_WAKE_SECS = 1.0
_HELLO_BYTES = 512
_HELLO_SECS = 60.0


class Mesh:
    """Links to the other ranks, used by one thread at a time.

    Args:
      rank: Rank of this process.
      peers: Rank -> connected socket.
      control: Socket that is also polled during an exchange.
      pump: Reads `control`. Raises to end an exchange, and returns False at the end of the connection.
      tick: Called after each poll.
      settings: Timeouts of an exchange without progress.

    Attributes:
      bytes_sent: Bytes sent to other ranks, over sockets or shared memory.
      moved_at: Monotonic time of the last transfer.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        control: socket.socket,
        pump: Callable[[], bool],
        tick: Callable[[], None],
        settings: Settings,
    ):
        self._control: socket.socket | None = control
        self._pump = pump
        self._tick = tick
        self._settings = settings
        self.bytes_sent, self.moved_at = 0, time.monotonic()
        self._links = _create_links(rank, peers, shares=settings.shares_memory)

    @property
    def paths(self) -> dict[int, str]:
        """Rank -> "memory" or "tcp"."""
        return {r: "memory" if isinstance(k, MemoryLink) else "tcp" for r, k in self._links.items()}

    @property
    def sockets(self) -> list[socket.socket]:
        """The connections to the other ranks."""
        return [link.socket for link in self._links.values()]

    def exchange(
        self,
        to: int,
        out: Sequence[np.ndarray],
        source: int,
        size: int,
        into: np.ndarray | None = None,
        consume: Consume | None = None,
    ) -> None:
        """Sends concatenated arrays to one rank and receives `size` bytes from another.

        Received bytes are written into the array `into`, or passed to `consume` in chunks. Both ends
        specify the same size. Raises Lost, with the rank as its second argument, if a connection ends.
        """
        sender, receiver = self._links[to], self._links[source]
        receiver.receive(size, into, consume)
        sender.send(out)
        self.bytes_sent += sum(array.nbytes for array in out)
        links = {sender, receiver}
        self.moved_at = warned_at = time.monotonic()
        while not (sender.is_sent and receiver.is_received):
            poller = self._poller(links)
            control = -1 if self._control is None else self._control.fileno()
            wants = {k: (k.wants_read, k.wants_write) for k in links}
            while wants == {k: (k.wants_read, k.wants_write) for k in links}:
                ready = dict(poller.poll(1000 * _WAKE_SECS))
                self._tick()
                if control in ready and not self._pump():
                    poller.unregister(control)
                    self._control = None
                for link in links:
                    events = ready.get(link.socket.fileno(), 0)
                    if events & ~select.POLLOUT and link.wants_read:
                        link.read()
                    if events & ~select.POLLIN and link.wants_write:
                        link.write()
                if ready.keys() - {control}:
                    self.moved_at = time.monotonic()
                elif not ready:
                    warned_at = self._check_stall(warned_at, to if receiver.is_received else source)

    def _poller(self, links: set[Link]) -> select.poll:
        """Returns a poller of `links` and `control`. `select.select` is limited to 1024 descriptors."""
        poller = select.poll()
        if self._control is not None:
            poller.register(self._control.fileno(), select.POLLIN)
        for link in links:
            events = select.POLLIN * link.wants_read | select.POLLOUT * link.wants_write
            if events:
                poller.register(link.socket.fileno(), events)
        return poller

    def close(self) -> None:
        """Closes all connections."""
        for link in self._links.values():
            link.close()

    def _check_stall(self, warned_at: float, rank: int) -> float:
        """Raises Lost or logs a warning after a timeout. Returns the time of the last warning."""
        now, moved_at, settings = time.monotonic(), self.moved_at, self._settings
        if settings.stall_shutdown and now - moved_at > settings.stall_shutdown:
            raise Lost(
                f"no bytes to or from it for {now - moved_at:.0f} s, in the middle of a collective; "
                f"{settings.stall_name}",
                rank,
            )
        if settings.stall_warning and now - max(moved_at, warned_at) > settings.stall_warning:
            print(
                f"hvd: no bytes to or from rank {rank} since {now - moved_at:.0f} s, in the middle of "
                "a collective",
                file=sys.stderr,
                flush=True,
            )
            return now
        return warned_at


def _create_links(rank: int, peers: Mapping[int, socket.socket], *, shares: bool) -> dict[int, Link]:
    """Returns a link to each rank. The lower rank of a pair offers memory, the higher one may open it."""
    offered = {peer: SharedMemory() for peer in peers if peer > rank and shares}
    links: dict[int, Link] = {}
    try:
        for peer in (peer for peer in peers if peer > rank):
            _send_message(peers[peer], offered[peer].offer() if peer in offered else {}, peer)
        for peer in (peer for peer in peers if peer < rank):
            offer = _receive_message(peers[peer], peer)
            memory = opened_memory(offer) if shares else None
            _send_message(peers[peer], {"sees": memory is not None}, peer)
            links[peer] = _create_link(peers[peer], peer, memory, is_first=False)
        for peer in (peer for peer in peers if peer > rank):
            is_open = _receive_message(peers[peer], peer)["sees"]
            memory = offered[peer].memory if is_open else None
            links[peer] = _create_link(peers[peer], peer, memory, is_first=True)
    finally:
        for shared in offered.values():
            shared.release()
    return links


def _create_link(sock: socket.socket, peer: int, memory: mmap.mmap | None, *, is_first: bool) -> Link:
    return SocketLink(sock, peer) if memory is None else MemoryLink(sock, peer, memory, is_first=is_first)


def _send_message(sock: socket.socket, message: Mapping[str, Any], peer: int) -> None:
    try:
        sock.sendall(json.dumps(message).encode().ljust(_HELLO_BYTES))
    except OSError as e:
        raise Lost(str(e), peer) from e


def _receive_message(sock: socket.socket, peer: int) -> dict[str, Any]:
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
