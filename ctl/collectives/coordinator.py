"""Coordinator on rank 0. It pairs the requests of all ranks and schedules the collectives.

All ranks receive the responses in the same order, so two ranks cannot block in different collectives. The
coordinator executes small collectives, because their requests contain the data. It has one thread. Each
rank's `Engine` is its client.
"""

import contextlib
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ctl.collectives.control_tree import ControlTree
from ctl.collectives.frames import Inbox, Lost, Outbox
from ctl.collectives.group_outbox import GroupOutbox, MemberOutbox
from ctl.collectives.heartbeats import PAUSE_SECS
from ctl.collectives.late_links import PortExchange
from ctl.collectives.negotiation import Negotiation
from ctl.collectives.relays import RankMessages, unpack_messages
from ctl.collectives.requests import Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline
from ctl.collectives.transfer_costs import NetworkCosts

_TICK_SECS = 0.5
_HEARTBEATS_PER_TIMEOUT = 4
_ABORT_SECS = 5.0  # time limit for sending the error message to the other ranks
_RETRY_SECS = 0.01


class Coordinator:
    """Thread that exchanges messages with all ranks, over one socket per subtree.

    Args:
      sockets: Rank -> connection, for this rank and its children in the tree.
      settings: Timeouts.
      timeline: Trace of the negotiation.
      tree: Tree of all ranks. None: each rank has a socket.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        settings: Settings,
        timeline: Timeline,
        tree: ControlTree | None = None,
    ):
        self._sockets = dict(sockets)
        self._timeline = timeline
        self._tree = tree or ControlTree(len(sockets), fanout=len(sockets))
        # the ranks that each socket reaches
        self._members = {rank: self._tree.members(rank) if rank else range(1) for rank in sockets}
        self._full_roots: set[int] = set()  # of sockets that cannot take all bytes of their outbox
        self._negotiation = Negotiation(self._tree.count, settings, timeline)
        for members in self._tree.subtrees(0):
            if len(members) > 1:
                group = GroupOutbox()
                for rank in members:
                    outbox = MemberOutbox(group, rank, is_root=rank == members[0])
                    self._negotiation.outboxes[rank] = outbox
        self._inboxes = {rank: Inbox() for rank in sockets}
        self._port_exchange = PortExchange()
        self._templates: dict[tuple[int, int], Request] = {}  # (rank, id) -> complete request
        self._equal_templates: dict[tuple, Request] = {}
        self._newest_requests: dict[int, Request] = {}  # id(template) -> newest request that refers to it
        self._heartbeat_timeout_secs = settings.heartbeat_timeout
        now_secs = time.monotonic()
        self._last_received_at = dict.fromkeys(range(self._tree.count), now_secs)
        self._last_heartbeat_at = self._last_poll_at = now_secs
        self._selector = selectors.DefaultSelector()
        for rank, sock in self._sockets.items():
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="hvd-coordinator", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def bytes_sent(self, rank: int) -> int:
        """Returns the number of bytes sent to one rank."""
        return self._negotiation.outboxes[rank].bytes_sent

    @property
    def remote_sockets(self) -> list[socket.socket]:
        """Connections to the other ranks."""
        return [sock for rank, sock in self._sockets.items() if rank]

    def join(self, timeout: float) -> None:
        """Waits until every rank has left, at most `timeout` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._coordinate()
        except BaseException as e:  # every rank waits for this thread
            self._abort(f"the coordinator of rank 0 failed: {type(e).__name__}: {e}")
        finally:
            self._selector.close()
            for sock in self._sockets.values():
                sock.close()

    def _abort(self, error_message: str) -> None:
        """Sends an error to all ranks. They fail their collectives, and the group ends."""
        print(f"hvd: {error_message}", file=sys.stderr, flush=True)
        outboxes, deadline = self._negotiation.outboxes, time.monotonic() + _ABORT_SECS
        self._negotiation.notify_lost_rank(0, error_message)
        unsent_ranks = {rank for rank in self._sockets if rank not in self._negotiation.departed}
        while unsent_ranks and time.monotonic() < deadline:
            for rank in list(unsent_ranks):
                with contextlib.suppress(Lost):
                    outboxes[rank].write(self._sockets[rank])
                    if outboxes[rank]:
                        continue
                unsent_ranks.discard(rank)
            time.sleep(_RETRY_SECS if unsent_ranks else 0.0)

    def _coordinate(self) -> None:
        negotiation = self._negotiation
        while len(negotiation.departed) < self._tree.count or any(negotiation.outboxes.values()):
            for key, events in self._selector.select(_TICK_SECS):
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            self._timeline.record_cycle()
            negotiation.send_responses()
            negotiation.check_stalls()
            if self._heartbeat_timeout_secs:
                self._check_heartbeats()
            for rank in sorted(self._sockets, reverse=True):  # this rank last, because it may end then
                self._write(rank)

    def _check_heartbeats(self) -> None:
        """Sends heartbeats to the ranks, and removes ranks without a message within the timeout."""
        now_secs = time.monotonic()
        if now_secs - self._last_poll_at > PAUSE_SECS:  # this process was stopped; other ranks may be too
            for rank in self._last_received_at:
                self._last_received_at[rank] += now_secs - self._last_poll_at
        self._last_poll_at = now_secs
        if now_secs - self._last_heartbeat_at < self._heartbeat_timeout_secs / _HEARTBEATS_PER_TIMEOUT:
            return
        self._last_heartbeat_at = now_secs
        for rank in sorted(self._last_received_at.keys() - self._negotiation.departed.keys()):
            silent_secs = now_secs - self._last_received_at[rank]
            if silent_secs > self._heartbeat_timeout_secs:
                self._disconnect(rank, f"silent for {silent_secs:.0f} s")
            else:
                self._negotiation.outboxes[rank].put({"type": "alive"})

    def _read(self, rank: int) -> None:
        inbox = self._inboxes[rank]
        self._last_received_at[rank] = time.monotonic()
        try:
            inbox.read(self._sockets[rank])
            for header, payload in inbox.messages():
                self._handle_messages(unpack_messages(rank, header, payload))
        except Lost as e:
            self._disconnect(rank, str(e))

    def _write(self, rank: int) -> None:
        outbox, sock = self._negotiation.outboxes[rank], self._sockets[rank]
        if not (outbox or rank in self._full_roots):
            return
        try:
            outbox.write(sock)
        except Lost as e:
            for member in self._members[rank]:
                self._negotiation.outboxes[member] = Outbox()
            if self._is_open(rank):
                self._read(rank)  # its last message may announce its shutdown
            self._disconnect(rank, str(e))
            return
        if bool(outbox) != (rank in self._full_roots) and self._is_open(rank):
            read_and_write = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(sock, read_and_write if outbox else selectors.EVENT_READ, rank)
            self._full_roots ^= {rank}

    def _handle_messages(self, messages: RankMessages) -> None:
        """Processes equal messages of some ranks."""
        header, message_type = messages.header, messages.header["type"]
        now_secs = time.monotonic()
        for rank in messages.ranks:
            self._last_received_at[rank] = now_secs
        if message_type == "several":
            start = 0
            for request_header in header["of"]:
                end = start + request_header["size"]
                payloads = [payload[start:end] for payload in messages.payloads]
                self._handle_requests(messages.ranks, request_header, payloads)
                start = end
        elif message_type in ("again", "template", "ask"):
            self._handle_requests(messages.ranks, header, messages.payloads)
        else:
            for rank in messages.ranks:
                self._handle_message(rank, header)

    def _handle_message(self, rank: int, header: dict[str, Any]) -> None:
        message_type = header["type"]
        if message_type == "leave":
            self._remove_rank(rank, "has left", is_lost=False)
            for member in self._members_below(rank):
                self._negotiation.outboxes[member].put({"type": "ending"})
        elif message_type == "gone":
            self._disconnect(rank, header["why"])
        elif message_type == "broken":
            self._negotiation.notify_lost_rank(header["rank"], header["why"])
        elif message_type == "listening":
            for member, message in self._port_exchange.add(rank, header):
                self._negotiation.outboxes[member].put(message)
        elif message_type in ("prepared", "stopped"):
            self._negotiation.agreement.add_reply(rank, header)
        elif message_type == "interrupt":
            self._negotiation.agreement.interrupt()
        elif message_type == "network":
            self._negotiation.network = NetworkCosts.of_header(header)

    def _handle_requests(
        self, ranks: Sequence[int], header: dict[str, Any], payloads: Sequence[bytes]
    ) -> None:
        """Adds requests with equal headers. References may refer to different requests of the ranks."""
        for rank, payload in zip(ranks, payloads, strict=True):
            if header["type"] == "again":
                request = self._refer(self._templates[rank, header["as"]], header["id"])
            else:
                fields = {name: value for name, value in header.items() if name not in ("type", "size")}
                request = Request(**fields)
            if header["type"] == "template":
                request = self._equal_templates.setdefault((request.key, request.id), request)
                self._templates[rank, request.id] = request
            self._negotiation.add_request(rank, request, payload)

    def _refer(self, template: Request, number: int) -> Request:
        """Returns a request that is equal to a template, one object for ranks with equal numbers."""
        newest = self._newest_requests.get(id(template))
        if newest is None or newest.id != number:
            newest = self._newest_requests[id(template)] = template.with_id(number)
        return newest

    def _disconnect(self, rank: int, reason: str) -> None:
        """Removes a rank after the end of its connection, and the ranks below it."""
        self._remove_rank(rank, f"died ({reason})", is_lost=True)
        is_lost = rank in self._negotiation.lost_ranks
        below_reason = f"is unreachable: rank {rank} died" if is_lost else "has left"
        for member in self._members_below(rank):
            self._remove_rank(member, below_reason, is_lost=is_lost)

    def _remove_rank(self, rank: int, reason: str, *, is_lost: bool) -> None:
        if rank in self._negotiation.departed:
            return
        self._negotiation.remove_rank(rank, reason, is_lost=is_lost)
        root = next(root for root, members in self._members.items() if rank in members)
        if not self._is_open(root):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._sockets[root])

    def _members_below(self, rank: int) -> range:
        """Returns the ranks that send their messages through a rank other than 0."""
        return self._tree.members(rank)[1:] if rank else range(0)

    def _is_open(self, root: int) -> bool:
        """Returns True if a rank that is reached by a socket has not departed."""
        return any(rank not in self._negotiation.departed for rank in self._members[root])
