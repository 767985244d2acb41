"""Relays of the messages between the coordinator on rank 0 and the ranks of a subtree (`control_tree`).

A relay is a thread of the rank at the root of the subtree. Equal messages of several ranks, such as
requests for the same collective, are combined into one. It waits `_COMBINE_SECS` for the other ranks, and
then sends the messages that it has. Messages of one rank keep their order.

| message | direction | meaning |
|---|---|---|
| of | to rank 0 | A message of several ranks, followed by their payloads in the same order. |
| to | from rank 0 | A message to several ranks, with the same payload. |
| gone | to rank 0 | A rank has disconnected, and those below it with it. |
"""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ctl.collectives.control_tree import ControlTree
from ctl.collectives.frames import Inbox, Lost, Outbox

_COMBINE_SECS = 0.001
_DRAIN_SECS = 5.0  # for the last messages to the ranks of the subtree
_RETRY_SECS = 0.01


class RankMessages(NamedTuple):
    """A message of several ranks.

    Attributes:
      header: Header, equal for all ranks.
      ranks: Ranks that have sent the message.
      payloads: Payload of each rank.
    """

    header: dict[str, Any]
    ranks: Sequence[int]
    payloads: Sequence[bytes]


def unpack_messages(rank: int, header: dict[str, Any], payload: bytes) -> RankMessages:
    """Returns the messages in a message of a rank, which may be a relay."""
    if header["type"] != "of":
        return RankMessages(header, [rank], [payload])
    payloads, start = [], 0
    for size in header["sizes"]:
        payloads.append(payload[start : start + size])
        start += size
    return RankMessages(header["header"], header["ranks"], payloads or [b""] * len(header["ranks"]))


def start_relay(
    tree: ControlTree, rank: int, control: socket.socket, accepted: Mapping[int, socket.socket]
) -> tuple[socket.socket, "Relay | None"]:
    """Starts a relay if ranks other than rank 0 send their messages to this one.

    Args:
      tree: Tree of the group.
      rank: This rank.
      control: Connection to the parent.
      accepted: Child rank -> connection.

    Returns:
      The connection for the messages of this rank, and the relay or None.
    """
    if rank == 0 or not accepted:
        return control, None
    own_socket, relay_socket = socket.socketpair()
    return own_socket, Relay(rank, tree, accepted, relay_socket, control)


class _Source:
    """A subtree of the relay, or its own rank."""

    def __init__(self, rank: int, members: range, sock: socket.socket):
        self.rank, self.members, self.socket = rank, members, sock
        self.inbox, self.outbox = Inbox(), Outbox()
        self.queue: deque[tuple[RankMessages, float]] = deque()  # with the times of their arrival
        self.is_own = self.has_left = self.is_full = False


class Relay:
    """Thread that relays the messages of a subtree.

    Args:
      rank: Root of the subtree.
      tree: Tree of the group.
      sockets: Child rank -> connection.
      own_socket: Connection to the engine of this rank.
      upstream: Connection to the parent.

    Attributes:
      remote_sockets: Connections to the other ranks.
    """

    def __init__(
        self,
        rank: int,
        tree: ControlTree,
        sockets: Mapping[int, socket.socket],
        own_socket: socket.socket,
        upstream: socket.socket,
    ):
        self._upstream, self._rank, self._parent = upstream, rank, tree.parent(rank)
        self._inbox, self._outbox = Inbox(), Outbox()
        self._is_ending = False  # rank 0 has left, or the parent
        own_source = _Source(rank, range(rank, rank + 1), own_socket)
        own_source.is_own = True
        self._sources = [own_source]
        for members in tree.subtrees(rank):
            self._sources.append(_Source(members[0], members, sockets[members[0]]))
        self.remote_sockets = [upstream, *(source.socket for source in self._sources[1:])]
        self._selector = selectors.DefaultSelector()
        self._selector.register(upstream, selectors.EVENT_READ, None)
        for source in self._sources:
            self._selector.register(source.socket, selectors.EVENT_READ, source)
        for sock in (upstream, *(source.socket for source in self._sources)):
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="hvd-relay", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits until all ranks of the subtree have left, at most `timeout` seconds."""
        self._thread.join(timeout)

    def end(self) -> None:
        """Ends all connections and the thread, after a failed start."""
        for sock in self.remote_sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.join(_DRAIN_SECS)

    def _run(self) -> None:
        try:
            while self._sources or self._outbox:
                self._poll()
        except Lost as e:  # the parent
            if not self._is_ending:
                self._send_error(f"rank {self._parent} is gone ({e}).")
        except BaseException as e:  # all ranks of the subtree wait for this thread
            self._send_error(f"a relay failed: {type(e).__name__}: {e}")
        finally:
            self._drain()
            self._selector.close()
            for sock in (self._upstream, *(source.socket for source in self._sources)):
                sock.close()

    def _poll(self) -> None:
        for key, events in self._selector.select(self._wait_secs()):
            if events & selectors.EVENT_READ and key.data is None:
                self._read_upstream()
            elif events & selectors.EVENT_READ:
                self._read(key.data)
        self._combine()
        for source in list(self._sources):
            self._write(source)
        self._outbox.write(self._upstream)
        self._watch(self._upstream, None, self._outbox)

    def _watch(self, sock: socket.socket, data: _Source | None, outbox: Outbox) -> None:
        read_and_write = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.modify(sock, read_and_write if outbox else selectors.EVENT_READ, data)

    def _wait_secs(self) -> float | None:
        arrivals = [source.queue[0][1] for source in self._sources if source.queue]
        return max(0.0, min(arrivals) + _COMBINE_SECS - time.monotonic()) if arrivals else None

    def _read(self, source: _Source) -> None:
        now_secs = time.monotonic()
        try:
            source.inbox.read(source.socket)
            for header, payload in source.inbox.messages():
                messages = unpack_messages(source.rank, header, payload)
                source.has_left |= messages.header["type"] == "leave" and source.rank in messages.ranks
                source.queue.append((messages, now_secs))
        except Lost as e:
            self._remove(source, str(e))

    def _remove(self, source: _Source, reason: str) -> None:
        """Removes a rank that has disconnected, and reports it."""
        self._selector.unregister(source.socket)
        source.socket.close()
        self._sources.remove(source)
        for messages, _ in source.queue:
            self._send([messages])
        if not (source.is_own and source.has_left):
            self._send([RankMessages({"type": "gone", "why": reason}, [source.rank], [b""])])

    def _combine(self) -> None:
        """Sends the messages that all ranks of the subtree have sent, and those that have waited."""
        while waiting := [source for source in self._sources if source.queue]:
            first = min(waiting, key=lambda source: source.queue[0][1])
            first_messages, arrived_at = first.queue[0]
            equal = [s for s in waiting if s.queue[0][0].header == first_messages.header]
            if len(equal) < len(self._sources) and time.monotonic() < arrived_at + _COMBINE_SECS:
                return
            self._send([source.queue.popleft()[0] for source in equal])

    def _send(self, combined: Sequence[RankMessages]) -> None:
        """Sends messages with equal headers to the parent."""
        payloads = [payload for messages in combined for payload in messages.payloads]
        envelope = {
            "type": "of",
            "ranks": [rank for messages in combined for rank in messages.ranks],
            "sizes": list(map(len, payloads)) if any(payloads) else [],
            "header": combined[0].header,
        }
        self._outbox.put(envelope, b"".join(payloads))

    def _read_upstream(self) -> None:
        self._inbox.read(self._upstream)
        for header, payload in self._inbox.messages():
            self._distribute(header["ranks"], header["header"], payload)

    def _distribute(self, ranks: Sequence[int], header: dict[str, Any], payload: bytes) -> None:
        """Sends a message to some ranks of the subtree."""
        self._is_ending |= header["type"] == "ending" and self._rank in ranks
        for source in self._sources:
            members = [rank for rank in ranks if rank in source.members]
            if members and len(source.members) == 1:
                source.outbox.put(header, payload)
            elif members:
                source.outbox.put({"type": "to", "ranks": members, "header": header}, payload)

    def _write(self, source: _Source) -> None:
        if not (source.outbox or source.is_full):
            return
        try:
            source.outbox.write(source.socket)
            source.is_full = bool(source.outbox)
            self._watch(source.socket, source, source.outbox)
        except Lost as e:
            source.outbox = Outbox()
            self._read(source)  # its last message may announce its shutdown
            if source in self._sources:
                self._remove(source, str(e))

    def _send_error(self, error_message: str) -> None:
        """Sends an error to the ranks of the subtree, which fail their collectives."""
        members = [rank for source in self._sources for rank in source.members]
        self._distribute(members, {"type": "lost", "why": error_message}, b"")

    def _drain(self) -> None:
        """Sends the messages for the ranks of the subtree."""
        unsent, deadline = list(self._sources), time.monotonic() + _DRAIN_SECS
        while unsent and time.monotonic() < deadline:
            for source in list(unsent):
                with contextlib.suppress(Lost):
                    source.outbox.write(source.socket)
                    if source.outbox:
                        continue
                unsent.remove(source)
            time.sleep(_RETRY_SECS if unsent else 0.0)
