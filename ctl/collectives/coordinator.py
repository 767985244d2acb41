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
from collections.abc import Mapping
from typing import Any

from ctl.collectives.frames import Inbox, Lost, Outbox
from ctl.collectives.heartbeats import PAUSE_SECS
from ctl.collectives.late_links import PortExchange
from ctl.collectives.negotiation import Negotiation
from ctl.collectives.requests import Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline
from ctl.collectives.transfer_costs import NetworkCosts

_TICK_SECS = 0.5
_HEARTBEATS_PER_TIMEOUT = 4
_ABORT_SECS = 5.0  # time limit for sending the error message to the other ranks
_RETRY_SECS = 0.01


class Coordinator:
    """Thread that exchanges messages with all ranks, over one socket per rank.

    Args:
      sockets: Rank -> connection, including this rank.
      settings: Timeouts.
      timeline: Trace of the negotiation.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], settings: Settings, timeline: Timeline):
        self._sockets = dict(sockets)
        self._timeline = timeline
        self._negotiation = Negotiation(len(sockets), settings, timeline)
        self._inboxes = {rank: Inbox() for rank in sockets}
        self._port_exchange = PortExchange()
        self._templates: dict[tuple[int, int], Request] = {}  # (rank, id) -> complete request
        self._heartbeat_timeout_secs = settings.heartbeat_timeout
        now_secs = time.monotonic()
        self._last_received_at = dict.fromkeys(sockets, now_secs)
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
        while len(negotiation.departed) < len(self._sockets) or any(negotiation.outboxes.values()):
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
        for rank in self._sockets.keys() - self._negotiation.departed.keys():
            silent_secs = now_secs - self._last_received_at[rank]
            if silent_secs > self._heartbeat_timeout_secs:
                self._remove_rank(rank, f"died (silent for {silent_secs:.0f} s)", is_lost=True)
            else:
                self._negotiation.outboxes[rank].put({"type": "alive"})

    def _read(self, rank: int) -> None:
        inbox = self._inboxes[rank]
        self._last_received_at[rank] = time.monotonic()
        try:
            inbox.read(self._sockets[rank])
            for header, payload in inbox.messages():
                self._handle_message(rank, header, payload)
        except Lost as e:
            self._remove_rank(rank, f"died ({e})", is_lost=True)

    def _write(self, rank: int) -> None:
        outbox, sock = self._negotiation.outboxes[rank], self._sockets[rank]
        try:
            outbox.write(sock)
        except Lost as e:
            self._negotiation.outboxes[rank] = Outbox()
            if rank not in self._negotiation.departed:
                self._read(rank)  # its last message may announce its shutdown
            self._remove_rank(rank, f"died ({e})", is_lost=True)
            return
        if rank not in self._negotiation.departed:
            read_and_write = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(sock, read_and_write if outbox else selectors.EVENT_READ, rank)

    def _handle_message(self, rank: int, header: dict[str, Any], payload: bytes) -> None:
        message_type = header.pop("type")
        if message_type == "leave":
            self._remove_rank(rank, "has left", is_lost=False)
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
        elif message_type == "alive":
            return
        elif message_type == "several":
            start = 0
            for request_header in header["of"]:
                size = request_header.get("size", 0)
                self._handle_request(
                    rank, request_header.pop("type"), request_header, payload[start : start + size]
                )
                start += size
        else:
            self._handle_request(rank, message_type, header, payload)

    def _handle_request(self, rank: int, request_type: str, header: dict[str, Any], payload: bytes) -> None:
        header.pop("size")
        if request_type == "again":
            request = self._templates[rank, header["as"]].with_id(header["id"])
        else:
            request = Request(**header)
        if request_type == "template":
            self._templates[rank, request.id] = request
        self._negotiation.add_request(rank, request, payload)

    def _remove_rank(self, rank: int, reason: str, *, is_lost: bool) -> None:
        if rank in self._negotiation.departed:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._sockets[rank])
        self._negotiation.remove_rank(rank, reason, is_lost=is_lost)
