"""Negotiation state: pending requests of all ranks and the responses to send."""

import sys
import time
from typing import Any

from ctl.collectives import inline, requests
from ctl.collectives.frames import Outbox
from ctl.collectives.group_outbox import MemberOutbox
from ctl.collectives.lines import Lines
from ctl.collectives.requests import FAILED_PRECONDITION, Request, format_ranks
from ctl.collectives.sequences import SequenceAgreement, Unit
from ctl.collectives.settings import Settings
from ctl.collectives.table import Round, Table
from ctl.collectives.timeline import Timeline
from ctl.collectives.transfer_costs import ONE_MACHINE, NetworkCosts

_POLL_INTERVAL_SECS = 0.25  # limits the checks, because messages arrive more often
_HINT = (
    "Check that all ranks run the same number of steps and the same branches, and stop at the same time."
)


class Negotiation:
    """State of the coordinator, which decides on the responses to requests. Not thread-safe.

    Args:
      size: Number of ranks.
      settings: Timeouts.
      timeline: Trace of the negotiation.

    Attributes:
      outboxes: Rank -> messages to send.
      departed: Rank that has left or is lost -> reason.
      lost_ranks: The lost ones.
      agreement: Agreement of the ranks on a repeated sequence of collectives.
      network: Costs from which all ranks select algorithms.
    """

    def __init__(self, size: int, settings: Settings, timeline: Timeline):
        self.outboxes: dict[int, Outbox | MemberOutbox] = {rank: Outbox() for rank in range(size)}
        self.departed: dict[int, str] = {}
        self.network = ONE_MACHINE
        self.lost_ranks: set[int] = set()
        self._settings = settings
        self._timeline = timeline
        self._table = Table(size)
        self.agreement = SequenceAgreement(
            size,
            lambda rank, header: self.outboxes[rank].put(header),
            lambda: settings.agrees_once and not self.departed and not timeline.is_active,
        )
        self._call_sites = Lines()
        self._complete: list[Round] = []
        self._warned_of_replies_at = 0.0  # age of the message (seconds)
        self._last_request_at = self._last_check_at = time.monotonic()

    def add_request(self, rank: int, request: Request, payload: bytes) -> None:
        """Adds a request of a rank. `payload` contains the data of an inline request."""
        self._last_request_at = time.monotonic()
        self._timeline.record_request(request.name, request.kind, rank)
        if request.process_set not in self._table.sets:
            message = f"{request.name}: process set {request.process_set} has been removed."
            self._send_error(rank, request, FAILED_PRECONDITION, message)
            return
        rounds_to_split, is_split = self._table.find_conflicts(request)
        for round_to_split in rounds_to_split:
            self._table.drop(round_to_split)
        for round_to_split in rounds_to_split:
            self._split_round(round_to_split)
        if is_split:
            self._split_request(rank, request, payload)
        else:
            self._add_to_round(rank, request, payload)

    def _add_to_round(self, rank: int, request: Request, payload: bytes) -> None:
        complete_round = self._table.put(rank, request, payload)
        if complete_round is not None:
            self._complete.append(complete_round)
        elif self.departed:
            self._fail_rounds_of_departed()

    def _split_round(self, fused_round: Round) -> None:
        """Replaces a fused collective with separate ones on the ranks that have requested it."""
        for rank, request in fused_round.requests.items():
            self._split_request(rank, request, fused_round.payloads[rank])

    def _split_request(self, rank: int, request: Request, payload: bytes) -> None:
        self.outboxes[rank].put({"type": "split", "id": request.id})
        offset = 0
        for part in request.parts():
            size = part.sizes[0]
            self._add_to_round(rank, part, payload[offset : offset + size])
            offset += size

    def remove_rank(self, rank: int, reason: str, *, is_lost: bool) -> None:
        """Removes a rank.

        Args:
          rank: Rank to remove.
          reason: Verb phrase for error messages, e.g. "has left".
          is_lost: True for a rank that was lost, False for one that has announced its shutdown.

        A rank that shuts down first executes the collectives that all ranks have requested, and is released
        afterwards. If it is rank 0, the other ranks are notified that its process may end. Collectives that
        are already scheduled must not fail.
        """
        self.agreement.cancel()
        if is_lost:
            self.lost_ranks.add(rank)
            self.departed[rank] = reason
            self.notify_lost_rank(rank, f"rank {rank} {reason}")
        else:
            self.send_responses()
            self.departed[rank] = reason
            self.outboxes[rank].put({"type": "left"})
            for other in self.outboxes.keys() - self.departed.keys() if rank == 0 else ():
                self.outboxes[other].put({"type": "ending"})
        self.send_responses()
        self._fail_rounds_of_departed()

    def notify_lost_rank(self, rank: int, error_message: str) -> None:
        """Notifies all remaining ranks of a lost rank. They abort their collectives."""
        for other, outbox in self.outboxes.items():
            if other not in self.departed:
                outbox.put({"type": "lost", "rank": rank, "why": error_message})

    def send_responses(self) -> None:
        """Sends the responses of all complete rounds in the order of their completion."""
        complete_rounds, self._complete = self._complete, []
        batch: list[Round] = []
        batch_bytes = 0
        for current_round in complete_rounds:
            self._timeline.record_agreement(current_round.name)
            ranks = self._table.sets.get(current_round.process_set, ())
            error = requests.find_error(ranks, current_round.requests)
            error = error or self._call_sites.find_error(current_round.requests)
            departed_members = [rank for rank in ranks if rank in self.departed]
            if error and current_round.any_request.names:
                self._split_round(current_round)  # the error is reported for the affected tensors only
                self.send_responses()
            elif error:
                self._fail_round(current_round, *error)
            elif current_round.any_request.kind.endswith("process_set"):
                self.agreement.add_unit(None)
                self._change_sets(current_round)
            elif current_round.is_inline:
                self._send_inline_results(ranks, current_round)
                self._add_unit([current_round])
            elif departed_members:  # a rank has left between its own request and the last request
                self._fail_for_departed(departed_members, current_round)
            else:
                num_bytes = current_round.any_request.size
                if batch and not self._can_fuse(batch[0], current_round, batch_bytes + num_bytes):
                    self._schedule_batch(batch)
                    batch, batch_bytes = [], 0
                batch.append(current_round)
                batch_bytes += num_bytes
        if batch:
            self._schedule_batch(batch)
        if self.agreement.advance(lambda: [r.requests for r in self._table.list_incomplete()]):
            for returned_round in self._table.list_incomplete():
                self._table.drop(returned_round)

    def check_stalls(self) -> None:
        """Logs overdue collectives. Fails deadlocks, and collectives that exceed the timeout of stalls."""
        now_secs = time.monotonic()
        if now_secs - self._last_check_at < _POLL_INTERVAL_SECS:
            return
        self._last_check_at = now_secs
        order_timeout = self._settings.order_timeout
        if order_timeout and now_secs - self._last_request_at > order_timeout:
            for rounds in list(self._table.find_deadlocks()):
                is_eager = all(r.is_eager for one_round in rounds for r in one_round.requests.values())
                if is_eager or now_secs - self._last_request_at > 3 * order_timeout:
                    self._fail_deadlock(rounds)
        warning_secs, shutdown_secs = self._settings.stall_warning, self._settings.stall_shutdown
        incomplete_rounds = [
            r for r in self._table.list_incomplete() if not r.requests.keys() <= self.departed.keys()
        ]
        overdue_rounds = [
            r for r in incomplete_rounds if now_secs - max(r.since, r.warned_at) > warning_secs
        ]
        if warning_secs and overdue_rounds:
            _log_overdue(self._table, overdue_rounds, now_secs)
        self._check_replies()
        for pending_round in self._table.list_incomplete():
            if shutdown_secs and now_secs - pending_round.since > shutdown_secs:
                missing = format_ranks(self._table.find_missing_ranks(pending_round))
                limit = f"{shutdown_secs:g} s ({self._settings.stall_name})"
                message = f"{pending_round.any_request}: {missing} did not request it within {limit}."
                self._fail_round(pending_round, "LOST", message)

    def _check_replies(self) -> None:
        """Logs ranks that do not reply to a message about a sequence, or fails the group."""
        missing_ranks, settings = self.agreement.missing_ranks, self._settings
        if not missing_ranks:
            self._warned_of_replies_at = 0.0
            return
        secs, limit_secs = self.agreement.waiting_secs, settings.stall_shutdown
        message = f"{format_ranks(missing_ranks)} did not respond to rank 0 for {secs:.0f} s"
        if limit_secs and secs > limit_secs:
            self.notify_lost_rank(missing_ranks[0], f"{message} ({settings.stall_name})")
        elif settings.stall_warning and secs - self._warned_of_replies_at > settings.stall_warning:
            self._warned_of_replies_at = secs
            print(f"hvd: {message}.", file=sys.stderr, flush=True)

    def _fail_rounds_of_departed(self) -> None:
        for pending_round in self._table.list_incomplete():
            departed_members = [
                r for r in self._table.find_missing_ranks(pending_round) if r in self.departed
            ]
            if departed_members:
                self._fail_for_departed(departed_members, pending_round)

    def _fail_for_departed(self, departed_members: list[int], failed_round: Round) -> None:
        first = next(rank for rank in self.departed if rank in departed_members)  # the others may follow it
        hint = "." if first in self.lost_ranks else f": its script has ended or failed. {_HINT}"
        message = f"{failed_round.any_request}: rank {first} {self.departed[first]}{hint}"
        self._fail_round(failed_round, "LOST", message)

    def _fail_round(self, failed_round: Round, code: str, message: str) -> None:
        if failed_round in self._table.list_incomplete():
            self._table.drop(failed_round)
        for rank, request in failed_round.requests.items():
            self._send_error(rank, request, code, message)

    def _send_error(self, rank: int, request: Request, code: str, message: str) -> None:
        self.outboxes[rank].put({"type": "error", "id": request.id, "code": code, "text": message})

    def _send_inline_results(self, ranks: tuple[int, ...], complete_round: Round) -> None:
        ordered_requests = [complete_round.requests[rank] for rank in ranks]
        varying_fields = _collect_varying_fields(ordered_requests)
        results = inline.execute_inline(ranks, complete_round.requests, complete_round.payloads)
        for rank, buffers in results.items():
            header = {"type": "result", "id": complete_round.requests[rank].id, **varying_fields}
            if len(buffers) > 1:
                header["sizes"] = [len(buffer) for buffer in buffers]
            self.outboxes[rank].put(header, *buffers)

    def _change_sets(self, complete_round: Round) -> None:
        first = complete_round.any_request
        if first.kind == "add_process_set":
            number = self._table.add_set(first.splits)
        else:
            number = self._table.remove_set(first.splits[0])
        for rank, request in complete_round.requests.items():
            self.outboxes[rank].put({"type": "result", "id": request.id, "number": number})

    def _add_unit(self, rounds: list[Round]) -> None:
        """Adds executed collectives to the history of `agreement`."""
        first = rounds[0].any_request
        is_repeatable = first.kind == "allreduce" and not first.process_set and not first.plane
        if not (is_repeatable and all(one_round.any_request.size for one_round in rounds)):
            self.agreement.add_unit(None)
            return
        # the ranks add in the same order as this one
        selection = _selection(self._settings.algorithm, self.network)
        if rounds[0].is_inline:
            selection = {"algorithm": inline.equal_algorithm(len(self.outboxes))}
        self.agreement.add_unit(Unit([one_round.requests for one_round in rounds], selection))

    def _can_fuse(self, first_round: Round, other_round: Round, total_bytes: int) -> bool:
        """Returns True if both rounds can be fused. `total_bytes` is the size of the fused message."""
        first, other = first_round.any_request, other_round.any_request
        return (
            first.kind == other.kind == "allreduce"
            and other_round.process_set == first_round.process_set
            and first.op == other.op
            and first.plane == other.plane
            and total_bytes <= self._settings.fusion_threshold
        )

    def _schedule_batch(self, batch: list[Round]) -> None:
        """Instructs the ranks to execute the collectives of a batch without the coordinator."""
        process_set, headers = batch[0].process_set, dict[tuple[int, ...], dict[str, Any]]()
        ranks = self._table.sets[process_set]
        members = {"ranks": ranks} if process_set else {}  # the message for all ranks does not list them
        varying_fields = _collect_varying_fields([batch[0].requests[rank] for rank in ranks])
        varying_fields |= _selection(self._settings.algorithm, self.network)
        for rank in ranks:
            ids = tuple(batch_round.requests[rank].id for batch_round in batch)
            if ids not in headers:
                headers[ids] = {"type": "begin", "ids": ids, **members, **varying_fields}
            self.outboxes[rank].put(headers[ids])
        self._add_unit(batch)

    def _fail_deadlock(self, rounds: list[Round]) -> None:
        requests_by_rank = sorted(
            (rank, str(request))
            for failed_round in rounds
            for rank, request in failed_round.requests.items()
        )
        message = "ranks wait in different collectives: " + "; ".join(
            f"rank {rank} in {request_text}" for rank, request_text in requests_by_rank
        )
        for failed_round in rounds:
            self._fail_round(failed_round, FAILED_PRECONDITION, f"{message}. {_HINT}")


def _selection(algorithm: str, network: NetworkCosts) -> dict[str, Any]:
    """Returns the fields of a message from which all ranks select the same algorithm."""
    return dict(network.header()) if algorithm == "auto" else {"algorithm": algorithm}


def _collect_varying_fields(ordered_requests: list[Request]) -> dict[str, Any]:
    """Returns the fields that may differ between ranks, such as the number of rows, for all ranks."""
    collective_type = ordered_requests[0].kind
    if collective_type == "allgather":
        return {"rows": [[shape[0] for shape in r.shapes] for r in ordered_requests]}
    if collective_type == "alltoall":
        return {"splits": [list(r.splits) for r in ordered_requests]}
    return {}


def _log_overdue(table: Table, overdue_rounds: list[Round], now_secs: float) -> None:
    lines = []
    for overdue_round in overdue_rounds:
        overdue_round.warned_at = now_secs
        waiting_ranks = format_ranks(sorted(overdue_round.requests))
        lines.append(
            f"  {overdue_round.any_request}: {waiting_ranks} waiting for "
            f"{now_secs - overdue_round.since:.0f} s; missing "
            f"{format_ranks(table.find_missing_ranks(overdue_round))}"
        )
    print(
        f"hvd: some ranks wait for collectives that other ranks have not requested. {_HINT}\n"
        + "\n".join(lines),
        file=sys.stderr,
        flush=True,
    )
