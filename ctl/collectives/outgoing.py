"""Outgoing requests of a rank. Repeated requests are sent as references, small requests in batches.

While the ranks repeat a sequence of collectives (`repetition.py`), requests are held and not sent.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from ctl.collectives.frames import Channel
from ctl.collectives.requests import Request

_MAX_TEMPLATES = 10_000  # requests that can be referenced; other requests are always sent completely
_MAX_QUEUED = 1000  # requests per message


class _Held(NamedTuple):
    request: Request
    payload: Sequence[np.ndarray]
    since: float


class Outgoing:
    """Queue of requests. Thread-safe. The thread that reads the channel calls `flush`.

    Attributes:
      has_queued: True if the queue contains requests.
      is_leaving: True if the message that this rank leaves is held.
      descriptor: File descriptor that becomes readable if there are new queued or held requests.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self._lock = threading.Lock()
        self._templates: dict[tuple, int] = {}
        self._headers: list[dict[str, Any]] = []
        self._payload: list[np.ndarray] = []
        self.has_queued = self.is_leaving = False
        self._is_holding = self._is_signalled = False
        self._held: dict[int, _Held] = {}  # by id, in the order of the ids
        self.descriptor, self._signal = os.pipe()

    @property
    def has_held(self) -> bool:
        """True if a request is held."""
        return bool(self._held)

    def put(self, request: Request, payload: Sequence[np.ndarray], *, is_delayed: bool) -> None:
        """Sends the request immediately, or in a batch if `is_delayed`. Raises Lost if rank 0 is lost."""
        with self._lock:  # a request must be sent before references to it
            if self._is_holding:
                self._held[request.id] = _Held(request, payload, time.monotonic())
                self._notify()
                return
            self._add(request, payload)
            if not is_delayed or len(self._headers) == _MAX_QUEUED:
                self._send()
            elif not self.has_queued:
                self.has_queued = True
                self._notify()

    def flush(self) -> None:
        """Sends the queued requests. Raises Lost if rank 0 is lost."""
        if self.has_queued:
            with self._lock:
                self._send()

    def leave(self) -> None:
        """Notifies rank 0 that this rank leaves, after the held requests. Raises Lost if rank 0 is lost."""
        with self._lock:
            self.is_leaving = True
            if self._is_holding:
                self._notify()
            else:
                self._send()
                self._channel.send({"type": "leave"})

    def acknowledge(self) -> None:
        """Resets `descriptor`."""
        with self._lock:
            if self._is_signalled:
                self._is_signalled = False
                os.read(self.descriptor, 1)

    def hold(self) -> None:
        """Sends the queued requests and holds further ones. Raises Lost if rank 0 is lost."""
        with self._lock:
            self._send()
            self._is_holding = True

    def hold_again(self, sent: Iterable[tuple[Request, Sequence[np.ndarray]]]) -> None:
        """Holds requests that have been sent, with their payload."""
        with self._lock:
            now_secs = time.monotonic()
            self._return({request.id: _Held(request, payload, now_secs) for request, payload in sent})

    def release(self) -> None:
        """Sends the held requests in their order. Raises Lost if rank 0 is lost."""
        with self._lock:
            self._is_holding = False
            held, self._held = self._held, {}
            for request, payload, _ in held.values():
                self._add(request, payload)
                if len(self._headers) == _MAX_QUEUED:
                    self._send()
            self._send()
            if self.is_leaving:
                self._channel.send({"type": "leave"})

    def list_held(self) -> list[tuple[Request, float]]:
        """Returns the held requests and the time for which each was held (seconds)."""
        now_secs = time.monotonic()
        with self._lock:
            return [(request, now_secs - since) for request, _, since in self._held.values()]

    def find_held(self, signatures: Sequence[tuple]) -> list[int] | None:
        """Returns ids of held requests with these signatures, or None if one is missing."""
        with self._lock:
            return self._find(signatures)

    def take_held(self, signatures: Sequence[tuple]) -> list[_Held] | None:
        """Removes and returns the requests of `find_held`."""
        with self._lock:
            ids = self._find(signatures)
            return None if ids is None else [self._held.pop(number) for number in ids]

    def return_held(self, held: Iterable[_Held]) -> None:
        """Holds requests of `take_held` again."""
        with self._lock:
            self._return({one.request.id: one for one in held})

    def close(self) -> None:
        """Closes the descriptors. `put` must not be called afterwards."""
        for descriptor in (self.descriptor, self._signal):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _find(self, signatures: Sequence[tuple]) -> list[int] | None:
        ids: list[int] = []
        for signature in signatures:
            for number, held in self._held.items():
                if held.request.signature == signature and number not in ids:
                    ids.append(number)
                    break
            else:
                return None
        return ids

    def _return(self, held: dict[int, _Held]) -> None:
        self._held = dict(sorted({**held, **self._held}.items()))

    def _notify(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            os.write(self._signal, b"w")

    def _add(self, request: Request, payload: Sequence[np.ndarray]) -> None:
        self._headers.append(self._header(request, payload))
        self._payload.extend(payload)

    def _send(self) -> None:
        headers, payload = self._headers, self._payload
        self._headers, self._payload, self.has_queued = [], [], False
        if len(headers) == 1:
            self._channel.send(headers[0], *payload)
        elif headers:
            self._channel.send({"type": "several", "of": headers}, *payload)

    def _header(self, request: Request, payload: Sequence[np.ndarray]) -> dict[str, Any]:
        key, size = request.key, sum(part.nbytes for part in payload)
        template_id = self._templates.get(key)
        if template_id is not None:
            return {"type": "again", "id": request.id, "as": template_id, "size": size}
        if len(self._templates) == _MAX_TEMPLATES:
            return {"type": "ask", "size": size, **request.header()}
        self._templates[key] = request.id
        return {"type": "template", "size": size, **request.header()}
