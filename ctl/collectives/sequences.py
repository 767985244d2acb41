"""Repeated sequences of all-reduces on rank 0: their detection, and the agreement of all ranks on one.

After some repetitions the ranks agree once on the sequence, and execute further repetitions without rank 0
(`repetition.py`). The messages, all over the connections to rank 0:

| message | from | meaning |
|---|---|---|
| prepare | rank 0 | Hold further requests. Contains the sequence. |
| prepared | each rank | Further requests are held. |
| repeat | rank 0 | Execute the sequence from a position. Contains the incomplete requests, to be held. |
| interrupt | any rank | The rank has another request, or waits in vain. |
| stop | rank 0 | Start no further collective of the sequence. |
| stopped | each rank | Number of started collectives, and whether the next one is requested. |
| resume | rank 0 | Execute the collectives up to a number, and send the held requests. |

No rank finishes an all-reduce before all ranks have started it, so the numbers of started collectives
differ by at most one. If a rank does not have the request of the last one, it contributes zeros, and all
ranks discard the result and request the collective again.
"""

import enum
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ctl.collectives.requests import Request

_MAX_PERIOD = 256  # units
_MAX_REQUESTS = 1000  # in a sequence
_MIN_REPETITIONS, _MAX_REPETITIONS = 3, 96
_MIN_REPEATED = 8  # periods; shorter repetitions are not worth their agreement


class Unit(NamedTuple):
    """Collectives that are executed together.

    Attributes:
      requests: For each collective, rank -> request.
      selection: Fields of a message that select the algorithm.
    """

    requests: Sequence[Mapping[int, Request]]
    selection: Mapping[str, Any]

    @property
    def signatures(self) -> list[tuple]:
        """Signatures of the requests of all ranks, in the order of the ranks."""
        return [requests[rank].signature for requests in self.requests for rank in sorted(requests)]


class SequenceDetector:
    """Detector of a repeated sequence in the executed collectives."""

    def __init__(self) -> None:
        self._num_required = _MIN_REPETITIONS
        self._history: list[tuple[Unit, list[tuple]]] = []
        self._last_index: dict[tuple, int] = {}
        self._period = self._num_equal = 0

    def add(self, unit: Unit | None) -> Sequence[Unit]:
        """Adds executed collectives, or None for a collective that cannot be repeated.

        Returns:
          The sequence that was repeated often enough, starting with its next collective, or ().
        """
        if unit is None:
            self.reset()
            return ()
        if len(self._history) > 4 * _MAX_PERIOD:
            self._forget()
        index, signatures = len(self._history), unit.signatures
        self._history.append((unit, signatures))
        previous_index = self._last_index.get(signatures[0], -1)
        self._last_index[signatures[0]] = index
        if self._period and self._history[index - self._period][1] == signatures:
            self._num_equal += 1
        else:
            is_known = previous_index >= 0 and self._history[previous_index][1] == signatures
            self._period = index - previous_index if is_known else 0
            self._num_equal = int(is_known)
        if not 0 < self._period <= _MAX_PERIOD or self._num_equal < (self._num_required - 1) * self._period:
            return ()
        return [unit for unit, _ in self._history[-self._period :]]

    def reset(self) -> None:
        """Forgets the executed collectives."""
        self._history, self._last_index = [], {}
        self._period = self._num_equal = 0

    def record_repetition(self, num_units: int, period: int) -> None:
        """Records the length of a repetition. After a short one, the next requires more repetitions."""
        self.reset()
        is_short = num_units < _MIN_REPEATED * period
        self._num_required = min(2 * self._num_required, _MAX_REPETITIONS) if is_short else _MIN_REPETITIONS

    def _forget(self) -> None:
        """Removes the oldest collectives from the history."""
        num_removed = len(self._history) - 2 * _MAX_PERIOD
        del self._history[:num_removed]
        self._last_index = {
            signature: index - num_removed
            for signature, index in self._last_index.items()
            if index >= num_removed
        }


class _State(enum.Enum):
    NEGOTIATING = "negotiating"
    PREPARING = "preparing"
    REPEATING = "repeating"
    STOPPING = "stopping"


class SequenceAgreement:
    """Agreement of all ranks on a repeated sequence. State of rank 0, used by its coordinator.

    Args:
      size: Number of ranks.
      send: Sends a message (rank, header).
      is_enabled: Returns False while each collective has to be negotiated.
    """

    def __init__(
        self, size: int, send: Callable[[int, dict[str, Any]], None], is_enabled: Callable[[], bool]
    ):
        self._size, self._send, self._is_enabled = size, send, is_enabled
        self._detector = SequenceDetector()
        self._state = _State.NEGOTIATING
        self._number = 0
        self._units: Sequence[Unit] = ()
        self._num_executed = 0  # after the message "prepare"
        self._deviates = False
        self._replies: dict[int, dict[str, Any]] = {}
        self._sent_at = 0.0

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that have not replied to the last message."""
        if self._state not in (_State.PREPARING, _State.STOPPING):
            return []
        return [rank for rank in range(self._size) if rank not in self._replies]

    @property
    def waiting_secs(self) -> float:
        """Time since the last message (seconds)."""
        return time.monotonic() - self._sent_at

    def add_unit(self, unit: Unit | None) -> None:
        """Adds collectives that the ranks are going to execute. None: one that cannot be repeated."""
        if self._state is _State.PREPARING:
            expected = self._units[self._num_executed % len(self._units)]
            self._deviates = self._deviates or unit is None or unit.signatures != expected.signatures
            self._num_executed += 1
            return
        sequence = self._detector.add(unit)
        num_requests = sum(len(one.requests) for one in sequence)
        if 0 < num_requests <= _MAX_REQUESTS and self._size > 1 and self._is_enabled():
            self._units, self._num_executed, self._deviates = sequence, 0, False
            self._start(_State.PREPARING)
            for rank in range(self._size):
                units = [
                    {"ids": [r[rank].id for r in unit.requests], "selection": unit.selection}
                    for unit in sequence
                ]
                self._send(rank, {"type": "prepare", "number": self._number, "units": units})

    def add_reply(self, rank: int, header: dict[str, Any]) -> None:
        """Adds the message "prepared" or "stopped" of a rank."""
        if header["number"] == self._number:
            self._replies[rank] = header

    def interrupt(self) -> None:
        """Ends the repetition."""
        if self._state is _State.REPEATING:
            self._start(_State.STOPPING)
            self._send_to_all({"type": "stop", "number": self._number})

    def cancel(self) -> None:
        """Ends the preparation of a repetition."""
        if self._state is _State.PREPARING:
            self._resume(until=0, is_void=False)

    def advance(self, list_incomplete: Callable[[], Sequence[Mapping[int, Request]]]) -> bool:
        """Sends the next message if all ranks have replied. Call this when no round is complete.

        Args:
          list_incomplete: Returns rank -> request for each incomplete round.

        Returns:
          True if the requests of the incomplete rounds were returned to their ranks.
        """
        if self._state is _State.REPEATING and not self._is_enabled():
            self.interrupt()
        if self._state not in (_State.PREPARING, _State.STOPPING) or len(self._replies) < self._size:
            return False
        if self._state is _State.STOPPING:
            until = max(reply["started"] for reply in self._replies.values())
            is_void = any(
                reply["started"] < until and not reply["is_ready"] for reply in self._replies.values()
            )
            self._resume(until, is_void)
            return False
        incomplete = list_incomplete()
        known = {signature for unit in self._units for signature in unit.signatures}
        requests = [request for one_round in incomplete for request in one_round.values()]
        if self._deviates or any(request.signature not in known for request in requests):
            self.cancel()
            return False
        self._state = _State.REPEATING
        position = self._num_executed % len(self._units)
        for rank in range(self._size):
            returned = [one_round[rank].id for one_round in incomplete if rank in one_round]
            self._send(rank, {"type": "repeat", "position": position, "returned": returned})
        return True

    def _resume(self, until: int, is_void: bool) -> None:
        self._state = _State.NEGOTIATING
        self._detector.record_repetition(until, len(self._units))
        self._send_to_all({"type": "resume", "number": self._number, "until": until, "is_void": is_void})

    def _start(self, state: _State) -> None:
        self._state, self._replies, self._sent_at = state, {}, time.monotonic()
        self._number += 1

    def _send_to_all(self, header: dict[str, Any]) -> None:
        for rank in range(self._size):
            self._send(rank, header)
