"""Collectives that were asked for and are not done; and what else may carry them out."""

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
    """A collective on its way.

    Attributes:
      request: what was asked.
      arrays: this rank's tensors, flat; `tensors` instead, where TensorFlow carries them.
      result: flat arrays, once it is done; their rows by rank in `more`.
      error: what to raise instead.
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
        """Whether it is done, within that many seconds."""
        if self._done.acquire(timeout=timeout):
            self._done.release()
            return True
        return False


class Plane(Protocol):
    """Another way for numbers to travel, in the coordinator's order: TensorFlow's."""

    def carries(self, kind: str, tensors: Sequence[Any]) -> bool: ...
    def begin(self, found: Sequence[Pending], header: dict[str, Any]) -> None: ...
    def joined(self, flat: Sequence[Any]) -> Any: ...
    def parted(self, joined: Any, counts: Sequence[int]) -> list[Any]: ...
    def abort(self, why: str) -> None: ...
    def close(self) -> None: ...


class _Part(Pending):
    """One tensor of those that were asked for together and travel one by one."""

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
    """What takes the place of a collective of several names; it is done with the last of them."""
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
