"""Large tensors between ranks: each sends to one neighbour while it receives from another."""

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
from ctl.collectives.links import (
    Consume,
    Link,
    MemoryLink,
    SharedMemory,
    SocketLink,
    Stream,
    StripedLink,
    opened_memory,
)
from ctl.collectives.settings import Settings

_WAKE_SECS = 1.0
_HELLO_BYTES = 512
_HELLO_SECS = 60.0


class Mesh:
    """Links to the other ranks, used by one thread at a time.

    Args:
      rank: this one's.
      peers: rank -> connected sockets.
      control: socket that is watched meanwhile, with
      pump: what reads it; it raises to end an exchange, and returns False at the end of the connection.
      tick: called again and again meanwhile.
      settings: how long without a byte until somebody is told, or until the other rank counts as lost.

    Attributes:
      bytes_sent: to other ranks, through sockets or shared memory.
      moved_at: monotonic time of the last bytes.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Sequence[socket.socket]],
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
        self._links = _linked(rank, peers, shares=settings.shares_memory)

    @property
    def paths(self) -> dict[int, str]:
        """Rank -> "memory" or "tcp"."""
        return {r: "memory" if isinstance(k, MemoryLink) else "tcp" for r, k in self._links.items()}

    @property
    def sockets(self) -> list[socket.socket]:
        """The connections to the other ranks."""
        return [stream.socket for link in self._links.values() for stream in link.streams]

    def exchange(
        self,
        to: int,
        out: Sequence[np.ndarray],
        source: int,
        size: int,
        into: np.ndarray | None = None,
        consume: Consume | None = None,
    ) -> None:
        """Sends arrays, joined, to one rank while it receives `size` bytes from another.

        These go into the array `into`, or to `consume`, chunk by chunk. Both ends give the same size.
        Raises Lost, with the rank as its second argument, if one of the two is gone.
        """
        sender, receiver = self._links[to], self._links[source]
        receiver.receive(size, into, consume)
        sender.send(out)
        self.bytes_sent += sum(array.nbytes for array in out)
        streams = {*sender.streams, *receiver.streams}
        self.moved_at = told_at = time.monotonic()
        while not (sender.is_sent and receiver.is_received):
            poller = self._poller(streams)
            control = -1 if self._control is None else self._control.fileno()
            wants = {s: (s.wants_read, s.wants_write) for s in streams}
            while wants == {s: (s.wants_read, s.wants_write) for s in streams}:
                ready = dict(poller.poll(1000 * _WAKE_SECS))
                self._tick()
                if control in ready and not self._pump():
                    poller.unregister(control)
                    self._control = None
                for stream in streams:
                    events = ready.get(stream.socket.fileno(), 0)
                    if events & ~select.POLLOUT and stream.wants_read:
                        stream.read()
                    if events & ~select.POLLIN and stream.wants_write:
                        stream.write()
                if ready.keys() - {control}:
                    self.moved_at = time.monotonic()
                elif not ready:
                    told_at = self._tell(told_at, to if receiver.is_received else source)

    def _poller(self, streams: set[Stream]) -> select.poll:
        """For descriptors of any number, which `select.select` does not take."""
        poller = select.poll()
        if self._control is not None:
            poller.register(self._control.fileno(), select.POLLIN)
        for stream in streams:
            events = select.POLLIN * stream.wants_read | select.POLLOUT * stream.wants_write
            if events:
                poller.register(stream.socket.fileno(), events)
        return poller

    def close(self) -> None:
        """Ends all connections."""
        for link in self._links.values():
            link.close()

    def _tell(self, told_at: float, rank: int) -> float:
        now, moved_at, settings = time.monotonic(), self.moved_at, self._settings
        if settings.stall_shutdown and now - moved_at > settings.stall_shutdown:
            raise Lost(
                f"no bytes to or from it for {now - moved_at:.0f} s, in the middle of a collective; "
                f"{settings.stall_name}",
                rank,
            )
        if settings.stall_warning and now - max(moved_at, told_at) > settings.stall_warning:
            print(
                f"hvd: no bytes to or from rank {rank} since {now - moved_at:.0f} s, in the middle of "
                "a collective",
                file=sys.stderr,
                flush=True,
            )
            return now
        return told_at


def _linked(rank: int, peers: Mapping[int, Sequence[socket.socket]], *, shares: bool) -> dict[int, Link]:
    """A link to each rank: the lower one offers memory, the higher one says whether it can see it."""
    offered = {peer: SharedMemory() for peer in peers if peer > rank and shares}
    links: dict[int, Link] = {}
    try:
        for peer in (peer for peer in peers if peer > rank):
            _say(peers[peer][0], offered[peer].offer() if peer in offered else {}, peer)
        for peer in (peer for peer in peers if peer < rank):
            offer = _heard(peers[peer][0], peer)
            memory = opened_memory(offer) if shares else None
            _say(peers[peer][0], {"sees": memory is not None}, peer)
            links[peer] = _link(peers[peer], peer, memory, is_first=False)
        for peer in (peer for peer in peers if peer > rank):
            sees = _heard(peers[peer][0], peer)["sees"]
            links[peer] = _link(peers[peer], peer, offered[peer].memory if sees else None, is_first=True)
    finally:
        for shared in offered.values():
            shared.release()
    return links


def _link(socks: Sequence[socket.socket], peer: int, memory: mmap.mmap | None, *, is_first: bool) -> Link:
    if memory is None:
        return SocketLink(socks[0], peer) if len(socks) == 1 else StripedLink(socks, peer)
    for sock in socks[1:]:
        sock.close()
    return MemoryLink(socks[0], peer, memory, is_first=is_first)


def _say(sock: socket.socket, what: Mapping[str, Any], peer: int) -> None:
    try:
        sock.sendall(json.dumps(what).encode().ljust(_HELLO_BYTES))
    except OSError as e:
        raise Lost(str(e), peer) from e


def _heard(sock: socket.socket, peer: int) -> dict[str, Any]:
    came = b""
    sock.settimeout(_HELLO_SECS)
    try:
        while len(came) < _HELLO_BYTES:
            data = sock.recv(_HELLO_BYTES - len(came))
            if not data:
                raise Lost("the connection was closed", peer)
            came += data
    except OSError as e:
        raise Lost(str(e), peer) from e
    return json.loads(came)
