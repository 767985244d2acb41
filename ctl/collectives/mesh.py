"""Exchange of large tensors: each rank sends to one rank while it receives from another."""

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
from ctl.collectives.late_links import LateLinks
from ctl.collectives.links import Consume, Link, MemoryLink, SharedMemory, SocketLink, open_memory
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
      receive_control: Reads `control`. Raises an error to end the exchange. Returns False if the connection
        has ended.
      on_poll: Called after each poll.
      settings: Timeouts of an exchange without progress.
      late_links: Connects further ranks. None: `peers` are all other ranks.

    Attributes:
      bytes_sent: Bytes sent to other ranks, over sockets or shared memory.
      last_transfer_at: `time.monotonic()` of the last transfer.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        control: socket.socket,
        receive_control: Callable[[], bool],
        on_poll: Callable[[], None],
        settings: Settings,
        late_links: LateLinks | None = None,
    ):
        self._rank, self._late_links = rank, late_links
        self._control: socket.socket | None = control
        self._receive_control = receive_control
        self._on_poll = on_poll
        self._settings = settings
        self.bytes_sent, self.last_transfer_at = 0, time.monotonic()
        self._links = _create_links(rank, peers, shares=settings.shares_memory)

    @property
    def paths(self) -> dict[int, str]:
        """Data path by rank: "memory" or "tcp"."""
        return {r: "memory" if isinstance(k, MemoryLink) else "tcp" for r, k in self._links.items()}

    @property
    def sockets(self) -> list[socket.socket]:
        """Connections to the other ranks."""
        return [link.socket for link in self._links.values()]

    def require_links(self, members: Sequence[int], *, all_pairs: bool = False) -> None:
        """Creates the links that this rank lacks for collectives of `members`. All members call it.

        Args:
          members: Participating ranks in order.
          all_pairs: True for algorithms in which each rank exchanges with all others.
        """
        if self._late_links is not None:
            sockets = self._late_links.connect(members, self._links.keys(), all_pairs=all_pairs)
            if sockets:
                self._links |= _create_links(self._rank, sockets, shares=self._settings.shares_memory)

    def exchange(
        self,
        destination: int,
        arrays: Sequence[np.ndarray],
        source: int,
        size: int,
        target: np.ndarray | None = None,
        consume: Consume | None = None,
    ) -> None:
        """Sends arrays to one rank and receives from another. Blocks until both messages are complete.

        Args:
          destination: Rank to send to.
          arrays: The message is their concatenation.
          source: Rank to receive from.
          size: Size of the received message (bytes). The sender specifies the same size.
          target: Array for the received bytes, or None.
          consume: Function that gets the received bytes in chunks, or None.

        Raises:
          Lost: If a connection ends or stalls. The second argument is the rank.
        """
        sender, receiver = self._links[destination], self._links[source]
        receiver.receive(size, target, consume)
        sender.send(arrays)
        self.bytes_sent += sum(array.nbytes for array in arrays)
        links = {sender, receiver}
        self.last_transfer_at = warned_at = time.monotonic()
        while not (sender.is_sent and receiver.is_received):
            poller = self._poller(links)
            control = -1 if self._control is None else self._control.fileno()
            initial_needs = {k: (k.needs_read, k.needs_write) for k in links}
            while initial_needs == {k: (k.needs_read, k.needs_write) for k in links}:
                events_by_descriptor = dict(poller.poll(1000 * _WAKE_SECS))
                self._on_poll()
                if control in events_by_descriptor and not self._receive_control():
                    poller.unregister(control)
                    self._control = None
                for link in links:
                    events = events_by_descriptor.get(link.socket.fileno(), 0)
                    if events & ~select.POLLOUT and link.needs_read:
                        link.read()
                    if events & ~select.POLLIN and link.needs_write:
                        link.write()
                if events_by_descriptor.keys() - {control}:
                    self.last_transfer_at = time.monotonic()
                elif not events_by_descriptor:
                    warned_at = self._check_stall(
                        warned_at, destination if receiver.is_received else source
                    )

    def _poller(self, links: set[Link]) -> select.poll:
        """Returns a poller of `links` and `control`. `select.select` is limited to 1024 descriptors."""
        poller = select.poll()
        if self._control is not None:
            poller.register(self._control.fileno(), select.POLLIN)
        for link in links:
            events = select.POLLIN * link.needs_read | select.POLLOUT * link.needs_write
            if events:
                poller.register(link.socket.fileno(), events)
        return poller

    def close(self) -> None:
        """Closes all connections."""
        for link in self._links.values():
            link.close()

    def _check_stall(self, warned_at: float, rank: int) -> float:
        """Logs a warning or raises Lost after a timeout. Returns the time of the last warning."""
        now_secs, last_transfer_at, settings = time.monotonic(), self.last_transfer_at, self._settings
        if settings.stall_shutdown and now_secs - last_transfer_at > settings.stall_shutdown:
            raise Lost(
                f"no data was exchanged with it for {now_secs - last_transfer_at:.0f} s during a "
                f"collective; {settings.stall_name}",
                rank,
            )
        if settings.stall_warning and now_secs - max(last_transfer_at, warned_at) > settings.stall_warning:
            print(
                f"hvd: no data was exchanged with rank {rank} for {now_secs - last_transfer_at:.0f} s "
                "during a collective",
                file=sys.stderr,
                flush=True,
            )
            return now_secs
        return warned_at


def _create_links(rank: int, peers: Mapping[int, socket.socket], *, shares: bool) -> dict[int, Link]:
    """Creates a link to each peer. The lower rank of a pair offers memory, and the higher rank opens it."""
    offered = {peer: SharedMemory() for peer in peers if peer > rank and shares}
    links: dict[int, Link] = {}
    try:
        for peer in (peer for peer in peers if peer > rank):
            _send_hello(peers[peer], offered[peer].offer() if peer in offered else {}, peer)
        for peer in (peer for peer in peers if peer < rank):
            offer = _receive_hello(peers[peer], peer)
            memory = open_memory(offer) if shares else None
            _send_hello(peers[peer], {"sees": memory is not None}, peer)
            links[peer] = _create_link(peers[peer], peer, memory, is_first=False)
        for peer in (peer for peer in peers if peer > rank):
            is_open = _receive_hello(peers[peer], peer)["sees"]
            memory = offered[peer].memory if is_open else None
            links[peer] = _create_link(peers[peer], peer, memory, is_first=True)
    finally:
        for shared in offered.values():
            shared.release()
    return links


def _create_link(sock: socket.socket, peer: int, memory: mmap.mmap | None, *, is_first: bool) -> Link:
    return SocketLink(sock, peer) if memory is None else MemoryLink(sock, peer, memory, is_first=is_first)


def _send_hello(sock: socket.socket, message: Mapping[str, Any], peer: int) -> None:
    try:
        sock.sendall(json.dumps(message).encode().ljust(_HELLO_BYTES))
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
