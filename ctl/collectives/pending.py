"""Collectives in flight, and the interface of an additional data plane."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from ctl.collectives import requests
from ctl.collectives.requests import Request

CreateError = Callable[[str, str], Exception]  # (error code, message) -> exception


@dataclass
class Pending:
    """A collective in flight.

    Attributes:
      request: Request of this rank.
      arrays: Flat input arrays, unless TensorFlow transfers `tensors`.
      result: Flat arrays after the end.
      response: Header of the response after the end, such as the rows by rank.
      error: Exception after a failure.
      tensors: Flat input tensors of the additional data plane.
    """

    request: Request
    arrays: Sequence[np.ndarray]
    result: Sequence[Any] = ()
    response: dict[str, Any] | None = None
    error: BaseException | None = None
    tensors: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._callbacks_lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []
        self.requested_at = time.monotonic()

    def finish(self) -> None:
        """Resumes waiting threads and runs the callbacks."""
        self._done.release()
        with self._callbacks_lock:
            callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            callback()

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        """Runs the callback in the thread that finishes the collective, or now if it has finished."""
        with self._callbacks_lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout: float = -1) -> bool:
        """Waits for at most `timeout` seconds (-1: no limit). Returns True if it has finished."""
        if self._done.acquire(timeout=timeout):
            self._done.release()
            return True
        return False


class Plane(Protocol):
    """Interface of an additional data plane. It executes collectives in the coordinator's order."""

    def can_execute(self, collective_kind: str, tensors: Sequence[Any]) -> bool:
        """Returns True if the plane supports a collective of these tensors."""

    def begin(self, pending_collectives: Sequence[Pending], header: dict[str, Any]) -> None:
        """Starts collectives that the coordinator has scheduled. Does not block."""

    def concatenate(self, flat: Sequence[Any]) -> Any:
        """Returns the concatenation of flat tensors."""

    def split(self, joined: Any, counts: Sequence[int]) -> list[Any]:
        """Splits a concatenation. `counts` are the numbers of elements of the parts."""

    def abort(self, reason: str) -> None:
        """Aborts the collectives in flight."""

    def close(self) -> None:
        """Releases the plane after the started collectives."""


class _Part(Pending):
    """One tensor of a fused collective that was split."""

    fused_collective: Pending
    siblings: Sequence[Pending]
    plane: Plane | None

    def finish(self) -> None:
        super().finish()
        if all(part.wait(0) for part in self.siblings):
            errors = [part.error for part in self.siblings if part.error is not None]
            self.fused_collective.error = errors[0] if errors else None
            if not errors:
                parts = [part.result[0] for part in self.siblings]
                self.fused_collective.result = [
                    self.plane.concatenate(parts) if self.plane else np.concatenate(parts)
                ]
            self.fused_collective.finish()


def split_pending(fused: Pending, plane: Plane | None) -> list[_Part]:
    """Returns collectives that replace one of several names. It finishes with the last of them."""
    requests = fused.request.parts()
    counts = [math.prod(request.shapes[0]) for request in requests]
    if plane is not None and fused.tensors:
        tensors = plane.split(fused.tensors[0], counts)
        parts = [
            _Part(r, (), tensors=(part_tensor,)) for r, part_tensor in zip(requests, tensors, strict=True)
        ]
    else:
        plane, arrays = None, np.split(fused.arrays[0], np.cumsum(counts)[:-1])
        parts = [_Part(r, (part_tensor,)) for r, part_tensor in zip(requests, arrays, strict=True)]
    for part in parts:
        part.fused_collective, part.siblings, part.plane = fused, parts, plane
    return parts


def execute_alone(pending: Pending, create_error: CreateError) -> None:
    """Executes the collective of a job with one rank."""
    request = pending.request
    error = requests.find_error([0], {0: request})
    if error:
        pending.error = create_error(*error)
    else:
        pending.result = [array.copy() for array in pending.arrays]
        pending.response = {
            "rows": [[s[0] if s else 1 for s in request.shapes]],
            "splits": [list(request.splits)],
            "number": -1,
        }
    pending.finish()
