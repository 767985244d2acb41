"""Detection of eager calls without a name that are paired with calls in other lines of the program.

Calls without a name are paired by their kind and order. If one rank makes an additional call, all later
ones are paired wrongly, and with equal shapes no other check detects it. Ranks may call one collective
from different lines (`if rank == 0: ... else: ...`). But if all ranks have once called it in the same line,
a pair of that line with another one is an error.
"""

from collections.abc import Mapping

from ctl.collectives.requests import FAILED_PRECONDITION, Request, ranks_named


class Lines:
    """Lines in which all ranks of a process set have called the same collective."""

    def __init__(self) -> None:
        self._common: set[tuple[int, str, str]] = set()

    def fault(self, requests: Mapping[int, Request]) -> tuple[str, str] | None:
        """Returns the error of all ranks' requests for one name as (code, message), or None."""
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
