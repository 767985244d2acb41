"""Outgoing requests of a rank. Repeated requests are sent as references, small ones in batches."""

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from ctl.collectives.frames import Channel
from ctl.collectives.requests import Request

_MOST_TEMPLATES = 10_000  # requests with a reference; later ones are always sent completely
_MOST_WAITING = 1000  # requests in one message


class Outgoing:
    """Queue of requests. Thread-safe; the thread that reads the channel calls `flush`.

    Attributes:
      waits: True if requests are in the queue.
      descriptor: Readable when the first request is in the queue.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self._lock = threading.Lock()
        self._templates: dict[tuple, int] = {}
        self._headers: list[dict[str, Any]] = []
        self._payload: list[np.ndarray] = []
        self.waits = False
        self.descriptor, self._signal = os.pipe()

    def put(self, request: Request, payload: Sequence[np.ndarray], *, later: bool) -> None:
        """Sends the request now, or in a batch if `later`. Raises Lost if rank 0 is lost."""
        with self._lock:  # a request must be sent before references to it
            self._headers.append(self._header(request, payload))
            self._payload.extend(payload)
            if not later or len(self._headers) == _MOST_WAITING:
                self._send()
            elif not self.waits:
                self.waits = True
                os.write(self._signal, b"w")

    def flush(self) -> None:
        """Sends the requests in the queue. Raises Lost if rank 0 is lost."""
        if self.waits:
            with self._lock:
                self._send()

    def close(self) -> None:
        """Closes the descriptors. `put` must not be called afterwards."""
        for descriptor in (self.descriptor, self._signal):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _send(self) -> None:
        headers, payload, waited = self._headers, self._payload, self.waits
        self._headers, self._payload, self.waits = [], [], False
        if waited:
            os.read(self.descriptor, 1)
        if len(headers) == 1:
            self._channel.send(headers[0], *payload)
        elif headers:
            self._channel.send({"type": "several", "of": headers}, *payload)

    def _header(self, request: Request, payload: Sequence[np.ndarray]) -> dict[str, Any]:
        key, size = request.key, sum(part.nbytes for part in payload)
        known = self._templates.get(key)
        if known is not None:
            return {"type": "again", "id": request.id, "as": known, "size": size}
        if len(self._templates) == _MOST_TEMPLATES:
            return {"type": "ask", "size": size, **request.header()}
        self._templates[key] = request.id
        return {"type": "template", "size": size, **request.header()}
