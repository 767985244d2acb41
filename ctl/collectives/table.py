"""Table of pending requests, which are paired by process set, name and order."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ctl.collectives.requests import Request


@dataclass(eq=False)
class Round:
    """One collective that at least one rank has requested.

    Attributes:
      requests: Rank -> its request.
      payloads: Rank -> data of an inline request.
      since: `time.monotonic()` of the first request.
      warned_at: Time of the last warning about missing ranks.
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
    """Incomplete rounds, and the process sets."""

    def __init__(self, size: int):
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._waiting: dict[tuple[int, str], list[Round]] = {}
        self._of_member: dict[tuple[int, str], list[Round]] = {}  # by one of a round's names

    def conflicts(self, request: Request) -> tuple[list[Round], bool]:
        """Returns the rounds to split, because a rank fuses their names differently.

        The second result is True if the request must be split too.
        """
        process_set, names = request.process_set, request.names
        if not names:
            return list(self._of_member.get((process_set, request.name), ())), False
        same = self._waiting.get((process_set, request.name), ())
        if any(found.any_request.names == names for found in same):
            return [], False
        members = [(process_set, name) for name in names]
        others = [found for key in members for found in self._of_member.get(key, ())]
        others = list(dict.fromkeys([*others, *same]))
        return others, bool(others) or any(key in self._waiting for key in members)

    def put(self, rank: int, request: Request, payload: bytes) -> Round | None:
        """Adds a request. Returns its round if the round is complete."""
        rounds = self._waiting.setdefault((request.process_set, request.name), [])
        for found in rounds:
            if rank not in found.requests:
                break
        else:
            found = Round(request.name, request.process_set)
            rounds.append(found)
            for name in request.names:
                self._of_member.setdefault((request.process_set, name), []).append(found)
        found.requests[rank] = request
        found.payloads[rank] = payload
        if len(found.requests) < len(self.sets.get(request.process_set, ())):
            return None
        self.drop(found)
        return found

    def drop(self, done: Round) -> None:
        """Removes a round."""
        key = (done.process_set, done.name)
        rounds = self._waiting[key]
        rounds.remove(done)
        if not rounds:
            del self._waiting[key]
        for name in done.any_request.names:
            member = (done.process_set, name)
            self._of_member[member].remove(done)
            if not self._of_member[member]:
                del self._of_member[member]

    def waiting(self) -> list[Round]:
        """Returns all incomplete rounds."""
        return [found for rounds in self._waiting.values() for found in rounds]

    def missing(self, found: Round) -> list[int]:
        """Returns the ranks that have not requested the collective."""
        return [r for r in self.sets[found.process_set] if r not in found.requests]

    def add_set(self, ranks: Sequence[int]) -> int:
        """Returns the number of the new process set, or -1 if one with these ranks exists."""
        ranks = tuple(ranks)
        if ranks in self.sets.values():
            return -1
        number = self._next_set
        self._next_set += 1
        self.sets[number] = ranks
        return number

    def remove_set(self, number: int) -> int:
        """Returns the number of the removed process set, or -1 if it does not exist."""
        return number if number and self.sets.pop(number, None) is not None else -1

    def at_odds(self) -> Iterator[list[Round]]:
        """Yields rounds of one process set that wait for each other: each rank waits in one of them.

        No request that could complete one of them can come from a blocked thread.
        """
        for number, ranks in self.sets.items():
            rounds = [r for r in self.waiting() if r.process_set == number]
            asking = {rank for found in rounds for rank in found.requests}
            if len(rounds) > 1 and len(asking) == len(ranks):
                yield rounds
