"""Finds eager calls without a name that were paired though they stand in different lines of the program.

Calls without a name are paired by their kind and order. When one rank makes one call more, all later ones
are paired wrongly, and with equal shapes nothing else would show it. Ranks may reach one collective from
different lines (`if rank == 0: ... else: ...`). But a line that all ranks have come to together belongs
to all of them: paired with another line it is a mistake.
"""

from collections.abc import Mapping

from ctl.collectives.requests import FAILED_PRECONDITION, Request, ranks_named


class Lines:
    """The lines that all ranks of a process set have come to together; `where` adds to them."""

    def __init__(self) -> None:
        self._common: set[tuple[int, str, str]] = set()

    def fault(self, requests: Mapping[int, Request]) -> tuple[str, str] | None:
        """What is wrong with the requests of all ranks for one name, as (code, sentence)."""
        first = next(iter(requests.values()))
        lines = {rank: request.line for rank, request in sorted(requests.items())}
        if not all(lines.values()):
            return None
        keys = {(first.process_set, first.name, line) for line in lines.values()}
        if len(keys) == 1:
            self._common |= keys
            return None
        if not keys & self._common:
            return None
        by_line: dict[str, list[int]] = {}
        for rank, line in lines.items():
            by_line.setdefault(line, []).append(rank)
        told = "; ".join(f"{ranks_named(ranks)} in {line}" for line, ranks in by_line.items())
        return FAILED_PRECONDITION, (
            f"{first.name}: ranks are in different lines of the program: {told}. One of them has made a "
            "call more than the others, or less. If these calls belong together, give them the same name=."
        )
