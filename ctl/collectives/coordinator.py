"""Coordinator on rank 0. It pairs the requests of all ranks and schedules the collectives.

All ranks receive the responses in the same order, so no two ranks can wait in different collectives. The
coordinator executes small collectives, because their requests contain the data. It has one thread. `Engine`
is the other side.
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
from ctl.collectives.negotiation import Agreement
from ctl.collectives.requests import Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline

PAUSE_SECS = 5.0  # a longer interval between polls means that the process was stopped
_TICK_SECS = 0.5
_SIGNS = 4  # heartbeats within the limit for silence
_ABORT_SECS = 5.0  # to send the error message to the other ranks
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
        self._agreement = Agreement(len(sockets), settings, timeline)
        self._inboxes = {rank: Inbox() for rank in sockets}
        self._templates: dict[tuple[int, int], Request] = {}  # (rank, id) -> complete request
        self._silence_secs = settings.silence
        now = time.monotonic()
        self._heard_at = dict.fromkeys(sockets, now)
        self._shown_at = self._awake_at = now
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
        return self._agreement.outboxes[rank].bytes_sent

    @property
    def remote_sockets(self) -> list[socket.socket]:
        """Connections to the other ranks."""
        return [sock for rank, sock in self._sockets.items() if rank]

    def join(self, timeout: float) -> None:
        """Waits until every rank has left."""
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

    def _abort(self, why: str) -> None:
        """Sends an error to all ranks that ends the group."""
        print(f"hvd: {why}", file=sys.stderr, flush=True)
        outboxes, until_secs = self._agreement.outboxes, time.monotonic() + _ABORT_SECS
        self._agreement.tell_lost(0, why)
        left = {rank for rank in self._sockets if rank not in self._agreement.gone}
        while left and time.monotonic() < until_secs:
            for rank in list(left):
                with contextlib.suppress(Lost):
                    outboxes[rank].write(self._sockets[rank])
                    if outboxes[rank]:
                        continue
                left.discard(rank)
            time.sleep(_RETRY_SECS if left else 0.0)

    def _coordinate(self) -> None:
        agreement = self._agreement
        while len(agreement.gone) < len(self._sockets) or any(agreement.outboxes.values()):
            for key, events in self._selector.select(_TICK_SECS):
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            self._timeline.cycle()
            agreement.answer()
            agreement.look_for_stalls()
            if self._silence_secs:
                self._show_life()
            for rank in sorted(self._sockets, reverse=True):  # this rank last, since it may end afterwards
                self._write(rank)

    def _show_life(self) -> None:
        """Sends heartbeats to the ranks. A rank that was silent for too long is lost."""
        now = time.monotonic()
        if now - self._awake_at > PAUSE_SECS:  # this process was stopped, and perhaps the other ranks too
            for rank in self._heard_at:
                self._heard_at[rank] += now - self._awake_at
        self._awake_at = now
        if now - self._shown_at < self._silence_secs / _SIGNS:
            return
        self._shown_at = now
        for rank in self._sockets.keys() - self._agreement.gone.keys():
            silent_secs = now - self._heard_at[rank]
            if silent_secs > self._silence_secs:
                self._leave(rank, f"died (silent for {silent_secs:.0f} s)")
            else:
                self._agreement.outboxes[rank].put({"type": "alive"})

    def _read(self, rank: int) -> None:
        inbox = self._inboxes[rank]
        self._heard_at[rank] = time.monotonic()
        try:
            inbox.read(self._sockets[rank])
            for header, payload in inbox.messages():
                self._take(rank, header, payload)
        except Lost as e:
            self._leave(rank, f"died ({e})")

    def _write(self, rank: int) -> None:
        outbox, sock = self._agreement.outboxes[rank], self._sockets[rank]
        try:
            outbox.write(sock)
        except Lost as e:
            self._agreement.outboxes[rank] = Outbox()
            if rank not in self._agreement.gone:
                self._read(rank)  # its last message may announce its shutdown
            self._leave(rank, f"died ({e})")
            return
        if rank not in self._agreement.gone:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(sock, both if outbox else selectors.EVENT_READ, rank)

    def _take(self, rank: int, header: dict[str, Any], payload: bytes) -> None:
        kind = header.pop("type")
        if kind == "leave":
            self._leave(rank, "has left")
        elif kind == "broken":
            self._agreement.tell_lost(header["rank"], header["why"])
        elif kind == "alive":
            return
        elif kind == "several":
            start = 0
            for one in header["of"]:
                size = one.get("size", 0)
                self._ask(rank, one.pop("type"), one, payload[start : start + size])
                start += size
        else:
            self._ask(rank, kind, header, payload)

    def _ask(self, rank: int, kind: str, header: dict[str, Any], payload: bytes) -> None:
        header.pop("size")
        if kind == "again":
            request = self._templates[rank, header["as"]].with_id(header["id"])
        else:
            request = Request(**header)
        if kind == "template":
            self._templates[rank, request.id] = request
        self._agreement.ask(rank, request, payload)

    def _leave(self, rank: int, how: str) -> None:
        if rank in self._agreement.gone:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._sockets[rank])
        self._agreement.leave(rank, how)
