"""Negotiation state: pending requests of all ranks and the responses to send."""

import sys
import time
from typing import Any

from ctl.collectives import inline, requests
from ctl.collectives.frames import Outbox
from ctl.collectives.lines import Lines
from ctl.collectives.requests import FAILED_PRECONDITION, Request, ranks_named
from ctl.collectives.settings import Settings
from ctl.collectives.table import Round, Table
from ctl.collectives.timeline import Timeline

_LOOK_SECS = 0.25  # messages may arrive a thousand times as often
_HINT = "Do all ranks run as many steps, the same branches, and stop at the same time?"


class Agreement:
    """Decisions of the coordinator. Not thread-safe.

    Args:
      size: Number of ranks.
      settings: Timeouts.
      timeline: Trace of the negotiation.

    Attributes:
      outboxes: Rank -> messages to send.
      gone: Rank -> reason of its end.
    """

    def __init__(self, size: int, settings: Settings, timeline: Timeline):
        self.outboxes = {rank: Outbox() for rank in range(size)}
        self.gone: dict[int, str] = {}
        self._settings = settings
        self._timeline = timeline
        self._table = Table(size)
        self._lines = Lines()
        self._complete: list[Round] = []
        self._last_request_at = self._looked_at = time.monotonic()

    def ask(self, rank: int, request: Request, payload: bytes) -> None:
        """Adds a request of a rank."""
        self._last_request_at = time.monotonic()
        self._timeline.asked(request.name, request.kind, rank)
        if request.process_set not in self._table.sets:
            text = f"{request.name}: there is no process set {request.process_set} any more."
            self._refuse(rank, request, FAILED_PRECONDITION, text)
            return
        rounds, is_split = self._table.conflicts(request)
        for found in rounds:
            self._table.drop(found)
        for found in rounds:
            self._split(found)
        if is_split:
            self._split_one(rank, request, payload)
        else:
            self._put(rank, request, payload)

    def _put(self, rank: int, request: Request, payload: bytes) -> None:
        done = self._table.put(rank, request, payload)
        if done is not None:
            self._complete.append(done)
        elif self.gone:
            self._fail_what_needs_the_gone()

    def _split(self, found: Round) -> None:
        """Replaces a fused collective by separate ones on the ranks that have requested it."""
        for rank, request in found.requests.items():
            self._split_one(rank, request, found.payloads[rank])

    def _split_one(self, rank: int, request: Request, payload: bytes) -> None:
        self.outboxes[rank].put({"type": "split", "id": request.id})
        start = 0
        for part in request.parts():
            size = part.sizes[0]
            self._put(rank, part, payload[start : start + size])
            start += size

    def leave(self, rank: int, how: str) -> None:
        """Removes a rank. `how` contains "died" unless the rank has announced its shutdown.

        A rank that shuts down takes part in the collectives that are already complete, and is released
        afterwards. If it is rank 0, the other ranks are notified that its process may end. This must not
        fail collectives that are already scheduled.
        """
        if "died" in how:
            self.gone[rank] = how
            self.tell_lost(rank, f"rank {rank} {how}")
        else:
            self.answer()
            self.gone[rank] = how
            self.outboxes[rank].put({"type": "left"})
            for other in self.outboxes.keys() - self.gone.keys() if rank == 0 else ():
                self.outboxes[other].put({"type": "ending"})
        self.answer()
        self._fail_what_needs_the_gone()

    def tell_lost(self, rank: int, why: str) -> None:
        """Notifies all remaining ranks that the group has failed. They abort their collectives."""
        for other, outbox in self.outboxes.items():
            if other not in self.gone:
                outbox.put({"type": "lost", "rank": rank, "why": why})

    def answer(self) -> None:
        """Sends the responses of all complete rounds, in the order of their completion."""
        complete, self._complete = self._complete, []
        batch: list[Round] = []
        size = 0
        for found in complete:
            self._timeline.agreed(found.name)
            ranks = self._table.sets.get(found.process_set, ())
            fault = requests.fault(ranks, found.requests) or self._lines.fault(found.requests)
            gone = [rank for rank in ranks if rank in self.gone]
            if fault and found.any_request.names:
                self._split(found)  # the error is reported for the affected tensors only
                self.answer()
            elif fault:
                self._fail(found, *fault)
            elif found.any_request.kind.endswith("process_set"):
                self._change_sets(found)
            elif found.is_inline:
                self._answer_inline(ranks, found)
            elif gone:  # it has left after its request, before the last request
                self._fail_for(gone, found)
            else:
                more = found.any_request.size
                if batch and not self._fits(batch[0], found, size + more):
                    self._begin(batch)
                    batch, size = [], 0
                batch.append(found)
                size += more
        if batch:
            self._begin(batch)

    def look_for_stalls(self) -> None:
        """Logs warnings about overdue collectives, and ends them after their timeout."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECS:
            return
        self._looked_at = now
        order = self._settings.order_timeout
        if order and now - self._last_request_at > order:
            for rounds in list(self._table.at_odds()):
                is_eager = all(r.is_eager for found in rounds for r in found.requests.values())
                if is_eager or now - self._last_request_at > 3 * order:
                    self._fail_at_odds(rounds)
        warn, shut = self._settings.stall_warning, self._settings.stall_shutdown
        waiting = [r for r in self._table.waiting() if not r.requests.keys() <= self.gone.keys()]
        late = [r for r in waiting if warn and now - max(r.since, r.warned_at) > warn]
        if late:
            _warn(self._table, late, now)
        for found in self._table.waiting():
            if shut and now - found.since > shut:
                missing = ranks_named(self._table.missing(found))
                limit = f"{shut:g} s ({self._settings.stall_name})"
                text = f"{found.any_request}: {missing} did not ask for it within {limit}."
                self._fail(found, "LOST", text)

    def _fail_what_needs_the_gone(self) -> None:
        for found in self._table.waiting():
            gone = [r for r in self._table.missing(found) if r in self.gone]
            if gone:
                self._fail_for(gone, found)

    def _fail_for(self, gone: list[int], found: Round) -> None:
        how = self.gone[gone[0]]
        hint = "." if "died" in how else f": its script has ended, or failed. {_HINT}"
        self._fail(found, "LOST", f"{found.any_request}: {ranks_named(gone)} {how}{hint}")

    def _fail(self, found: Round, code: str, text: str) -> None:
        if found in self._table.waiting():
            self._table.drop(found)
        for rank, request in found.requests.items():
            self._refuse(rank, request, code, text)

    def _refuse(self, rank: int, request: Request, code: str, text: str) -> None:
        self.outboxes[rank].put({"type": "error", "id": request.id, "code": code, "text": text})

    def _answer_inline(self, ranks: tuple[int, ...], found: Round) -> None:
        everyone = [found.requests[rank] for rank in ranks]
        for rank, buffers in inline.answers(ranks, found.requests, found.payloads).items():
            header = {"type": "result", "id": found.requests[rank].id, **_apart(everyone)}
            if len(buffers) > 1:
                header["sizes"] = [len(buffer) for buffer in buffers]
            self.outboxes[rank].put(header, *buffers)

    def _change_sets(self, found: Round) -> None:
        first = found.any_request
        if first.kind == "add_process_set":
            number = self._table.add_set(first.splits)
        else:
            number = self._table.remove_set(first.splits[0])
        for rank, request in found.requests.items():
            self.outboxes[rank].put({"type": "result", "id": request.id, "number": number})

    def _fits(self, one: Round, found: Round, size: int) -> bool:
        """Returns True if both rounds can be fused, with `size` bytes in total."""
        first, other = one.any_request, found.any_request
        return (
            first.kind == other.kind == "allreduce"
            and found.process_set == one.process_set
            and first.op == other.op
            and first.plane == other.plane
            and size <= self._settings.fusion_threshold
        )

    def _begin(self, batch: list[Round]) -> None:
        """Instructs the ranks to execute the collectives of these rounds among themselves."""
        ranks = self._table.sets[batch[0].process_set]
        apart = _apart([batch[0].requests[rank] for rank in ranks])
        for rank in ranks:
            ids = [found.requests[rank].id for found in batch]
            header = {"type": "begin", "ids": ids, "ranks": ranks, **apart}
            self.outboxes[rank].put(header)

    def _fail_at_odds(self, rounds: list[Round]) -> None:
        lines = sorted((rank, str(request)) for found in rounds for rank, request in found.requests.items())
        text = "ranks wait in different collectives: " + "; ".join(
            f"rank {rank} in {what}" for rank, what in lines
        )
        for found in rounds:
            self._fail(found, FAILED_PRECONDITION, f"{text}. {_HINT}")


def _apart(everyone: list[Request]) -> dict[str, Any]:
    """Returns the fields that a rank needs from the requests of all ranks because they may differ."""
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
        f"hvd: some ranks wait for collectives that others have not asked for. {_HINT}\n"
        + "\n".join(lines),
        file=sys.stderr,
        flush=True,
    )
