"""Table of pending requests. They are paired by process set, name and order."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ctl.collectives.requests import Request


@dataclass(eq=False)
class Round:
    """One collective that at least one rank has requested.

    Attributes:
      name: Name of the collective.
      process_set: Number of the process set.
      requests: Rank -> its request.
      payloads: Rank -> data of an inline request.
      since: `time.monotonic()` of the first request.
      warned_at: `time.monotonic()` of the last warning about missing ranks.
    """

    name: str
    process_set: int
    requests: dict[int, Request] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    warned_at: float = 0.0

    @property
    def is_inline(self) -> bool:
        """True if all requests contain their data."""
        return all(request.is_inline for request in self.requests.values())

    @property
    def any_request(self) -> Request:
        """Request of the lowest rank."""
        return self.requests[min(self.requests)]


class Table:
    """Table of incomplete rounds and of process sets.

    Args:
      size: Number of ranks.

    Attributes:
      sets: Ranks by number of the process set.
    """

    def __init__(self, size: int):
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._rounds_by_name: dict[tuple[int, str], list[Round]] = {}
        self._rounds_by_member: dict[tuple[int, str], list[Round]] = {}  # by one of a round's names

    def find_conflicts(self, request: Request) -> tuple[list[Round], bool]:
        """Finds pending rounds that fuse other names than a request.

        Returns:
          The rounds to split, and True if the request must be split too.
        """
        process_set, names = request.process_set, request.names
        if not names:
            return list(self._rounds_by_member.get((process_set, request.name), ())), False
        same_name_rounds = self._rounds_by_name.get((process_set, request.name), ())
        if any(pending_round.any_request.names == names for pending_round in same_name_rounds):
            return [], False
        members = [(process_set, name) for name in names]
        conflicting_rounds = [
            pending_round for key in members for pending_round in self._rounds_by_member.get(key, ())
        ]
        conflicting_rounds = list(dict.fromkeys([*conflicting_rounds, *same_name_rounds]))
        return conflicting_rounds, bool(conflicting_rounds) or any(
            key in self._rounds_by_name for key in members
        )

    def put(self, rank: int, request: Request, payload: bytes) -> Round | None:
        """Adds a request. Returns and removes its round if the round is complete, otherwise None."""
        rounds = self._rounds_by_name.setdefault((request.process_set, request.name), [])
        for pending_round in rounds:
            if rank not in pending_round.requests:
                break
        else:
            pending_round = Round(request.name, request.process_set)
            rounds.append(pending_round)
            for name in request.names:
                self._rounds_by_member.setdefault((request.process_set, name), []).append(pending_round)
        pending_round.requests[rank] = request
        pending_round.payloads[rank] = payload
        if len(pending_round.requests) < len(self.sets.get(request.process_set, ())):
            return None
        self.drop(pending_round)
        return pending_round

    def drop(self, removed_round: Round) -> None:
        """Removes a round from the table."""
        key = (removed_round.process_set, removed_round.name)
        rounds = self._rounds_by_name[key]
        rounds.remove(removed_round)
        if not rounds:
            del self._rounds_by_name[key]
        for name in removed_round.any_request.names:
            member = (removed_round.process_set, name)
            self._rounds_by_member[member].remove(removed_round)
            if not self._rounds_by_member[member]:
                del self._rounds_by_member[member]

    def list_incomplete(self) -> list[Round]:
        """Returns all rounds that some ranks have not requested yet."""
        return [pending_round for rounds in self._rounds_by_name.values() for pending_round in rounds]

    def find_missing_ranks(self, pending_round: Round) -> list[int]:
        """Returns the ranks that have not requested the collective."""
        return [r for r in self.sets[pending_round.process_set] if r not in pending_round.requests]

    def add_set(self, ranks: Sequence[int]) -> int:
        """Adds a process set. Returns its number, or -1 if a set with these ranks exists."""
        ranks = tuple(ranks)
        if ranks in self.sets.values():
            return -1
        number = self._next_set
        self._next_set += 1
        self.sets[number] = ranks
        return number

    def remove_set(self, number: int) -> int:
        """Removes a process set. Returns its number, or -1 if it does not exist."""
        return number if number and self.sets.pop(number, None) is not None else -1

    def find_deadlocks(self) -> Iterator[list[Round]]:
        """Yields the rounds of each process set in which every rank waits, in different collectives.

        A blocked thread cannot send the request that would complete one of them.
        """
        for number, ranks in self.sets.items():
            rounds = [r for r in self.list_incomplete() if r.process_set == number]
            requesting_ranks = {rank for pending_round in rounds for rank in pending_round.requests}
            if len(rounds) > 1 and len(requesting_ranks) == len(ranks):
                yield rounds
