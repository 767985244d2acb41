"""Collectives in flight, and the interface of an additional data plane."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from ctl.collectives.requests import Request


@dataclass
class Pending:
    """A collective in flight.

    Attributes:
      request: Request of this rank.
      arrays: Flat tensors of this rank, unless TensorFlow transfers `tensors`.
      result: Flat arrays after the end.
      more: Header of the response after the end, such as the rows by rank.
      error: Exception after a failure.
    """

    request: Request
    arrays: Sequence[np.ndarray]
    result: Sequence[Any] = ()
    more: dict[str, Any] | None = None
    error: BaseException | None = None
    tensors: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()
        self._callbacks_lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] | None = []
        self.asked_at = time.monotonic()

    def finish(self) -> None:
        """Wakes waiting threads and runs the callbacks."""
        self._done.release()
        with self._callbacks_lock:
            callbacks, self._callbacks = self._callbacks or [], None
        for callback in callbacks:
            callback()

    def call_when_finished(self, callback: Callable[[], None]) -> None:
        """Runs the callback in the thread that finishes the collective, or now if it is finished."""
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
    """Additional data plane that executes collectives in the coordinator's order, such as TensorFlow's."""

    def carries(self, kind: str, tensors: Sequence[Any]) -> bool: ...
    def begin(self, found: Sequence[Pending], header: dict[str, Any]) -> None: ...
    def joined(self, flat: Sequence[Any]) -> Any: ...
    def parted(self, joined: Any, counts: Sequence[int]) -> list[Any]: ...
    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...


class _Part(Pending):
    """One tensor of a fused collective that was split."""

    whole: Pending
    siblings: Sequence[Pending]
    plane: Plane | None

    def finish(self) -> None:
        super().finish()
        if all(part.wait(0) for part in self.siblings):
            errors = [part.error for part in self.siblings if part.error is not None]
            self.whole.error = errors[0] if errors else None
            if not errors:
                parts = [part.result[0] for part in self.siblings]
                self.whole.result = [self.plane.joined(parts) if self.plane else np.concatenate(parts)]
            self.whole.finish()


def split_pending(whole: Pending, plane: Plane | None) -> list[_Part]:
    """Returns collectives that replace one of several names. It finishes with the last of them."""
    requests = whole.request.parts()
    counts = [math.prod(request.shapes[0]) for request in requests]
    if plane is not None and whole.tensors:
        tensors = plane.parted(whole.tensors[0], counts)
        found = [_Part(r, (), tensors=(one,)) for r, one in zip(requests, tensors, strict=True)]
    else:
        plane, arrays = None, np.split(whole.arrays[0], np.cumsum(counts)[:-1])
        found = [_Part(r, (one,)) for r, one in zip(requests, arrays, strict=True)]
    for part in found:
        part.whole, part.siblings, part.plane = whole, found, plane
    return found
