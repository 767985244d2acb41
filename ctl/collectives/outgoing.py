"""Outgoing requests of a rank. Repeated requests are sent as references, small requests in batches."""

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from ctl.collectives.frames import Channel
from ctl.collectives.requests import Request

_MAX_TEMPLATES = 10_000  # requests that can be referenced; other requests are always sent completely
_MAX_QUEUED = 1000  # requests per message


class Outgoing:
    """Queue of requests. Thread-safe. The thread that reads the channel calls `flush`.

    Attributes:
      has_queued: True if the queue contains requests.
      descriptor: File descriptor that is readable while the queue contains requests.
    """

    def __init__(self, channel: Channel):
        self._channel = channel
        self._lock = threading.Lock()
        self._templates: dict[tuple, int] = {}
        self._headers: list[dict[str, Any]] = []
        self._payload: list[np.ndarray] = []
        self.has_queued = False
        self.descriptor, self._signal = os.pipe()

    def put(self, request: Request, payload: Sequence[np.ndarray], *, is_delayed: bool) -> None:
        """Sends the request immediately, or in a batch if `is_delayed`. Raises Lost if rank 0 is lost."""
        with self._lock:  # a request must be sent before references to it
            self._headers.append(self._header(request, payload))
            self._payload.extend(payload)
            if not is_delayed or len(self._headers) == _MAX_QUEUED:
                self._send()
            elif not self.has_queued:
                self.has_queued = True
                os.write(self._signal, b"w")

    def flush(self) -> None:
        """Sends the queued requests. Raises Lost if rank 0 is lost."""
        if self.has_queued:
            with self._lock:
                self._send()

    def close(self) -> None:
        """Closes the descriptors. `put` must not be called afterwards."""
        for descriptor in (self.descriptor, self._signal):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _send(self) -> None:
        headers, payload, was_signalled = self._headers, self._payload, self.has_queued
        self._headers, self._payload, self.has_queued = [], [], False
        if was_signalled:
            os.read(self.descriptor, 1)
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
