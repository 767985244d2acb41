"""Execution of a repeated sequence of all-reduces by one rank, without rank 0.

`sequences.py` describes the messages between the ranks and rank 0.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ctl.collectives.frames import Lost
from ctl.collectives.outgoing import Outgoing
from ctl.collectives.requests import Request

_MAX_EXECUTED = 4096  # requests that a sequence can refer to
_PATIENCE_SECS = 0.02  # requests wait so long for others of this rank that come first in the sequence
_MAX_IDLE_SECS = 1.0  # limit of an exchange without transfers
_WAIT_SECS = 1.0

ArrayLayout = tuple[np.dtype, int]  # dtype and number of elements


class RepeatedUnit(NamedTuple):
    """Collectives of a sequence that are executed together.

    Attributes:
      requests: Requests of this rank in an earlier repetition.
      layouts: Layouts of their arrays.
      selection: Fields of a message that select the algorithm.
    """

    requests: Sequence[Request]
    layouts: Sequence[Sequence[ArrayLayout]]
    selection: Mapping[str, Any]

    def zeros(self) -> list[list[np.ndarray]]:
        """Returns arrays of zeros for each request."""
        return [[np.zeros(size, dtype) for dtype, size in layouts] for layouts in self.layouts]


class Repetition:
    """Repeated sequence of one rank. All methods are called by the engine's thread.

    Args:
      outgoing: Requests that are held during the repetition.
      scheduled: Messages of rank 0 to execute in order, such as "begin" and "resume".
      send: Sends a message to rank 0.
      receive: Processes messages of rank 0, and waits for one at most the given time (seconds).
      execute: Executes collectives (unit, ids of the requests, or None to contribute zeros) and returns
        their results.
      finish: Finishes a collective (id of the request, results).

    Attributes:
      is_repeating: True between the execution of the messages "repeat" and "resume".
    """

    def __init__(
        self,
        outgoing: Outgoing,
        scheduled: deque[dict[str, Any]],
        send: Callable[[dict[str, Any]], None],
        receive: Callable[[float], None],
        execute: Callable[[RepeatedUnit, Sequence[int] | None], list[list[np.ndarray]]],
        finish: Callable[[int, list[np.ndarray]], None],
    ):
        self._outgoing, self._scheduled = outgoing, scheduled
        self._send, self._receive, self._execute, self._finish = send, receive, execute, finish
        self._executed: dict[int, tuple[Request, list[ArrayLayout]]] = {}
        self._prepared_units: Sequence[dict[str, Any]] = ()
        self._prepared: dict[int, tuple[Request, list[ArrayLayout]]] = {}
        self._units: list[RepeatedUnit] = []
        self._known: set[tuple] = set()
        self._position = self._num_started = self._number = 0
        self.is_repeating = self._is_stopped = self._has_interrupted = False

    @property
    def wait_secs(self) -> float:
        """Time limit of a wait for messages of rank 0 and requests of this rank (seconds)."""
        return _PATIENCE_SECS if self.is_repeating and self._outgoing.has_held else _WAIT_SECS

    def record(self, request: Request, arrays: Sequence[np.ndarray]) -> None:
        """Records an executed collective, if it is an all-reduce."""
        if request.kind != "allreduce":
            return
        if len(self._executed) >= _MAX_EXECUTED:
            del self._executed[next(iter(self._executed))]
        self._executed[request.id] = request, [(array.dtype, array.size) for array in arrays]

    def prepare(self, header: dict[str, Any]) -> None:
        """Holds further requests."""
        self._prepared_units = header["units"]
        ids = {number for unit in self._prepared_units for number in unit["ids"]}
        self._prepared = {number: self._executed[number] for number in ids & self._executed.keys()}
        with contextlib.suppress(Lost):  # the next read raises the error
            self._outgoing.hold()
            self._send({"type": "prepared", "number": header["number"]})

    def start(
        self, header: dict[str, Any], returned: Sequence[tuple[Request, Sequence[np.ndarray]]]
    ) -> None:
        """Starts the repetition. `returned` are the requests that rank 0 returns, with their payload."""
        self._units = []
        for unit in self._prepared_units:
            executed = [self._prepared.get(number) or self._executed[number] for number in unit["ids"]]
            requests, layouts = zip(*executed, strict=True)
            self._units.append(RepeatedUnit(requests, layouts, unit["selection"]))
        self._known = {request.signature for unit in self._units for request in unit.requests}
        self._outgoing.hold_again(returned)
        self._position, self._num_started = header["position"], 0
        self.is_repeating, self._is_stopped, self._has_interrupted = True, False, False

    def stop(self, header: dict[str, Any]) -> None:
        """Starts no further collective of the sequence until `resume`."""
        self._is_stopped = True
        is_ready = self._outgoing.find_held(self._signatures()) is not None
        reply = {"type": "stopped", "number": header["number"], "started": self._num_started}
        with contextlib.suppress(Lost):
            self._send({**reply, "is_ready": is_ready})

    def advance(self) -> bool:
        """Executes the collectives that this rank has requested, in the order of the sequence.

        Returns True if it has executed any.
        """
        has_executed = False
        while self.is_repeating and not self._is_stopped:
            held = self._outgoing.take_held(self._signatures())
            if held is None:
                if self._outgoing.is_leaving or self._has_other_request():
                    self.interrupt()
                return has_executed
            has_executed, unit = True, self._next_unit()
            ids = [one.request.id for one in held]
            results = self._execute(unit, ids)
            while self._is_stopped and not self._scheduled:
                self._receive(_WAIT_SECS)
            if self._is_stopped and self._is_void(self._scheduled[0]):
                self._outgoing.return_held(held)
            else:
                self._finish_all(ids, results)
        return has_executed

    def resume(self, header: dict[str, Any]) -> None:
        """Executes the last collective of the repetition if necessary, and sends the held requests."""
        if self._num_started < header["until"]:
            held = None if header["is_void"] else self._outgoing.take_held(self._signatures())
            ids = None if held is None else [one.request.id for one in held]
            results = self._execute(self._next_unit(), ids)
            if ids is not None:
                self._finish_all(ids, results)
        self.is_repeating = False
        with contextlib.suppress(Lost):
            self._outgoing.release()

    def interrupt(self) -> None:
        """Asks rank 0 to end the repetition."""
        if self.is_repeating and not (self._is_stopped or self._has_interrupted):
            self._has_interrupted = True
            with contextlib.suppress(Lost):
                self._send({"type": "interrupt"})

    def check_transfers(self, last_transfer_at: float) -> None:
        """Ends the repetition if a rank waits for another one, so that rank 0 finds the missing rank."""
        if self.is_repeating and time.monotonic() - last_transfer_at > _MAX_IDLE_SECS:
            self.interrupt()

    def _is_void(self, header: dict[str, Any]) -> bool:
        """Returns True if the last started collective lacks the values of a rank."""
        return header["is_void"] and header["until"] == self._num_started

    def _finish_all(self, ids: Sequence[int], results: list[list[np.ndarray]]) -> None:
        for number, result in zip(ids, results, strict=True):
            self._finish(number, result)

    def _signatures(self) -> list[tuple]:
        return [request.signature for request in self._units[self._position].requests]

    def _next_unit(self) -> RepeatedUnit:
        unit = self._units[self._position]
        self._position = (self._position + 1) % len(self._units)
        self._num_started += 1
        return unit

    def _has_other_request(self) -> bool:
        """Returns True if a held request may have to be executed before the next one of the sequence."""
        signatures = self._signatures()
        for request, held_secs in self._outgoing.list_held():
            if request.signature not in self._known or held_secs > _PATIENCE_SECS:
                return True
            if request.is_eager and request.signature not in signatures:
                return True
        return False
