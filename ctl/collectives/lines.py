"""Detection of unnamed eager calls that are paired with calls in other lines of the program.

Calls without a name are paired by their kind and order. If one rank makes an additional call, all later
calls are paired incorrectly, and with equal shapes no other check detects it. Ranks may call one collective
from different lines (`if rank == 0: ... else: ...`). However, if all ranks have once called it in the same
line, a pair of that line with another line is an error.
"""

from collections.abc import Mapping

from ctl.collectives.requests import FAILED_PRECONDITION, Request, format_ranks


class Lines:
    """Lines in which all ranks of a process set have called the same collective."""

    def __init__(self) -> None:
        self._common: set[tuple[int, str, str]] = set()

    def find_error(self, requests: Mapping[int, Request]) -> tuple[str, str] | None:
        """Checks the requests of all ranks for one name. Returns the error (code, message), or None."""
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
        ranks_and_lines = "; ".join(f"{format_ranks(ranks)} in {line}" for line, ranks in by_line.items())
        return FAILED_PRECONDITION, (
            f"{first.name}: ranks are in different lines of the program: {ranks_and_lines}. A rank has "
            "made one call more or fewer than the other ranks. If these calls belong together, pass the "
            "same name= to them."
        )
