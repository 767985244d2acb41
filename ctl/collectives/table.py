"""Which ranks have asked for what: requests are paired by process set, name and order."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ctl.collectives.requests import Request


@dataclass(eq=False)
class Round:
    """One collective on its way to being complete.

    Attributes:
      requests: rank -> what it asked.
      payloads: rank -> the numbers that came with it, if they did.
      since: `time.monotonic()` of the first request.
      warned_at: when somebody was told last that ranks are missing.
    """

    name: str
    process_set: int
    requests: dict[int, Request] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)
    warned_at: float = 0.0

    @property
    def is_inline(self) -> bool:
        """All numbers are here already."""
        return all(request.is_inline for request in self.requests.values())

    @property
    def any_request(self) -> Request:
        """Of the lowest rank that asked."""
        return self.requests[min(self.requests)]


class Table:
    """Requests that wait for those of other ranks, and the process sets they wait in."""

    def __init__(self, size: int):
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._waiting: dict[tuple[int, str], list[Round]] = {}
        self._of_member: dict[tuple[int, str], list[Round]] = {}  # of a name within a round's names

    def conflicts(self, request: Request) -> tuple[list[Round], bool]:
        """Rounds whose names have to go one by one, since a rank joins them otherwise.

        And whether those of the request itself have to.
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
        """Takes a request in; returns its round if that is complete now."""
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
        """Takes a round out."""
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
        """Every round that some rank has yet to join."""
        return [found for rounds in self._waiting.values() for found in rounds]

    def missing(self, found: Round) -> list[int]:
        """The ranks it waits for."""
        return [r for r in self.sets[found.process_set] if r not in found.requests]

    def add_set(self, ranks: Sequence[int]) -> int:
        """Returns its number; -1 if there is one of these ranks."""
        ranks = tuple(ranks)
        if ranks in self.sets.values():
            return -1
        number = self._next_set
        self._next_set += 1
        self.sets[number] = ranks
        return number

    def remove_set(self, number: int) -> int:
        """Returns the number; -1 if there is no such set."""
        return number if number and self.sets.pop(number, None) is not None else -1

    def at_odds(self) -> Iterator[list[Round]]:
        """Rounds of one process set that wait for one another: each of its ranks waits in one.

        No request that could complete one of them can come from a thread that waits.
        """
        for number, ranks in self.sets.items():
            rounds = [r for r in self.waiting() if r.process_set == number]
            asking = {rank for found in rounds for rank in found.requests}
            if len(rounds) > 1 and len(asking) == len(ranks):
                yield rounds
