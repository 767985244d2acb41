"""Rank 0 knows what every rank has asked for, and says when to begin, and in which order.

Each rank is answered in one order, so no two of them ever wait in different collectives; small ones
are done here, with the numbers that came along. One thread; see `Engine` for the other side.
"""

import contextlib
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from ctl.hvd.engine import inline, requests
from ctl.hvd.engine.frames import Inbox, Lost, Outbox
from ctl.hvd.engine.requests import FAILED_PRECONDITION, Request, ranks_named
from ctl.hvd.engine.settings import Settings
from ctl.hvd.engine.table import Round, Table
from ctl.hvd.engine.timeline import Timeline

_TICK_SECS = 0.5


class Coordinator:
    """Owns one socket per rank and a thread.

    Args:
      sockets: rank -> connection to it, its own included.
      settings: how long to wait before somebody is told.
      timeline: where what is negotiated is drawn.
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], settings: Settings, timeline: Timeline
    ):
        self._sockets = dict(sockets)
        self._settings = settings
        self._timeline = timeline
        self._inboxes = {rank: Inbox() for rank in sockets}
        self._outboxes = {rank: Outbox() for rank in sockets}
        self._table = Table(len(sockets))
        self._complete: list[Round] = []
        self._gone: dict[int, str] = {}
        self._last_request_at = time.monotonic()
        self._selector = selectors.DefaultSelector()
        for rank, sock in self._sockets.items():
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="hvd-coordinator", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits until every rank has left."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while len(self._gone) < len(self._sockets) or any(self._outboxes.values()):
            for key, events in self._selector.select(_TICK_SECS):
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            self._timeline.cycle()
            self._answer()
            self._look_for_stalls()
            for rank in sorted(self._sockets, reverse=True):  # this one, which may leave then, last
                self._write(rank)
        self._selector.close()
        for sock in self._sockets.values():
            sock.close()

    def _read(self, rank: int) -> None:
        inbox = self._inboxes[rank]
        try:
            inbox.read(self._sockets[rank])
            for header, payload in inbox.messages():
                self._take(rank, header, payload)
        except Lost as e:
            self._leave(rank, f"died ({e})")

    def _write(self, rank: int) -> None:
        outbox, sock = self._outboxes[rank], self._sockets[rank]
        try:
            outbox.write(sock)
        except Lost as e:
            self._outboxes[rank] = Outbox()
            self._leave(rank, f"died ({e})")
            return
        if rank not in self._gone:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(sock, both if outbox else selectors.EVENT_READ, rank)

    def _take(self, rank: int, header: dict[str, Any], payload: bytes) -> None:
        kind = header.pop("type")
        if kind == "leave":
            self._leave(rank, "has left")
        elif kind == "broken":
            self._tell_lost(header["rank"], header["why"])
        else:
            self._last_request_at = time.monotonic()
            request = Request(**header)
            self._timeline.asked(request.name, request.kind, rank)
            if request.process_set not in self._table.sets:
                text = f"{request.name}: there is no process set {request.process_set} any more."
                self._refuse(rank, request, FAILED_PRECONDITION, text)
                return
            done = self._table.put(rank, request, payload)
            if done is not None:
                self._complete.append(done)
            elif self._gone:
                self._fail_what_needs_the_gone()

    def _leave(self, rank: int, how: str) -> None:
        if rank in self._gone:
            return
        self._gone[rank] = how
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._sockets[rank])
        if "died" in how:
            self._tell_lost(rank, f"rank {rank} {how}")
        self._answer()
        self._fail_what_needs_the_gone()

    def _tell_lost(self, rank: int, why: str) -> None:
        for other, outbox in self._outboxes.items():
            if other not in self._gone:
                outbox.put({"type": "lost", "rank": rank, "why": why})

    def _fail_what_needs_the_gone(self) -> None:
        for found in self._table.waiting():
            gone = [r for r in self._table.missing(found) if r in self._gone]
            if gone:
                how = self._gone[gone[0]]
                self._fail(found, "LOST", f"{found.any_request}: {ranks_named(gone)} {how}.")

    def _fail(self, found: Round, code: str, text: str) -> None:
        if found in self._table.waiting():
            self._table.drop(found)
        for rank, request in found.requests.items():
            self._refuse(rank, request, code, text)

    def _refuse(self, rank: int, request: Request, code: str, text: str) -> None:
        self._outboxes[rank].put({"type": "error", "id": request.id, "code": code, "text": text})

    def _answer(self) -> None:
        """Says of every complete round what is to be done, in the order they were completed."""
        complete, self._complete = self._complete, []
        batch: list[Round] = []
        for found in complete:
            self._timeline.agreed(found.name)
            ranks = self._table.sets.get(found.process_set, ())
            fault = requests.fault(ranks, found.requests)
            if fault:
                self._fail(found, *fault)
            elif found.any_request.kind.endswith("process_set"):
                self._change_sets(found)
            elif found.is_inline:
                self._answer_inline(ranks, found)
            else:
                if batch and not self._fits(batch, found):
                    self._begin(batch)
                    batch = []
                batch.append(found)
        if batch:
            self._begin(batch)

    def _answer_inline(self, ranks: tuple[int, ...], found: Round) -> None:
        everyone = [found.requests[rank] for rank in ranks]
        for rank, buffers in inline.answers(ranks, found.requests, found.payloads).items():
            header = {"type": "result", "id": found.requests[rank].id, **_apart(everyone)}
            if len(buffers) > 1:
                header["sizes"] = [len(buffer) for buffer in buffers]
            self._outboxes[rank].put(header, *buffers)

    def _change_sets(self, found: Round) -> None:
        first = found.any_request
        if first.kind == "add_process_set":
            number = self._table.add_set(first.splits)
        else:
            number = self._table.remove_set(first.splits[0])
        for rank, request in found.requests.items():
            self._outboxes[rank].put({"type": "result", "id": request.id, "number": number})

    def _fits(self, batch: list[Round], found: Round) -> bool:
        first, other = batch[0].any_request, found.any_request
        size = sum(sum(r.any_request.sizes) for r in [*batch, found])
        return (
            first.kind == other.kind == "allreduce"
            and found.process_set == batch[0].process_set
            and first.op == other.op
            and size <= self._settings.fusion_threshold
        )

    def _begin(self, batch: list[Round]) -> None:
        """Tells the ranks to exchange the numbers of these rounds among themselves."""
        ranks = self._table.sets[batch[0].process_set]
        apart = _apart([batch[0].requests[rank] for rank in ranks])
        for rank in ranks:
            ids = [found.requests[rank].id for found in batch]
            header = {"type": "begin", "ids": ids, "ranks": ranks, **apart}
            self._outboxes[rank].put(header)

    def _look_for_stalls(self) -> None:
        now = time.monotonic()
        order = self._settings.order_timeout
        if order and now - self._last_request_at > order:
            for rounds in list(self._table.at_odds()):
                is_eager = all(r.is_eager for found in rounds for r in found.requests.values())
                if is_eager or now - self._last_request_at > 3 * order:
                    self._fail_at_odds(rounds)
        warn, shut = self._settings.stall_warning, self._settings.stall_shutdown
        late = [r for r in self._table.waiting() if warn and now - max(r.since, r.warned_at) > warn]
        if late:
            _warn(self._table, late, now)
        for found in self._table.waiting():
            if shut and now - found.since > shut:
                missing = ranks_named(self._table.missing(found))
                text = f"{found.any_request}: {missing} did not ask for it within {shut:g} s."
                self._fail(found, "LOST", text)

    def _fail_at_odds(self, rounds: list[Round]) -> None:
        lines = sorted(
            (rank, str(request)) for found in rounds for rank, request in found.requests.items()
        )
        text = "ranks wait in different collectives: " + "; ".join(
            f"rank {rank} in {what}" for rank, what in lines
        )
        for found in rounds:
            self._fail(found, FAILED_PRECONDITION, text + ".")


def _apart(everyone: list[Request]) -> dict[str, Any]:
    """What a rank must know of the requests of all, where these may differ."""
    kind = everyone[0].kind
    if kind == "allgather":
        return {"rows": [[shape[0] for shape in r.shapes] for r in everyone]}
    if kind == "alltoall":
        return {"splits": [list(r.splits) for r in everyone]}
    return {}


def _warn(table: Table, late: list[Round], now: float) -> None:
    lines = []
    for found in late:
        found.warned_at = now
        ready = ranks_named(sorted(found.requests))
        lines.append(
            f"  {found.any_request}: {ready} wait since {now - found.since:.0f} s; missing "
            f"{ranks_named(table.missing(found))}"
        )
    print(
        "hvd: some ranks wait for collectives that others have not asked for. Do all ranks run as "
        "many steps, and the same branches?\n" + "\n".join(lines),
        file=sys.stderr,
        flush=True,
    )
