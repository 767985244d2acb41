"""Connections from the launcher to the workers of an elastic job. Their messages become ordered events.

    for worker, message in channels.events():
        channels.send(worker, {"place": ...})

A connection belongs to its authenticated worker. Its end is the event `{"gone": True}`.
"""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

from ctl.io import authenticated_channel
from ctl.io.authenticated_channel import ChannelRefusedError, Listener
from ctl.io.json_lines import JsonLines

PURPOSE, IDENTITY = "elastic", "launcher"
_ACCEPT_SECS = 0.5
_BACKLOG = 4096


class WorkerChannels:
    """Authentication of workers in one thread, and one reader thread per connection."""

    def __init__(self, secret: str, host: str):
        """Binds a free port of `host`. Raises OSError if it is not an address of this machine."""
        server = socket.create_server((host, 0), backlog=_BACKLOG)
        self.port = server.getsockname()[1]
        endpoint = authenticated_channel.Endpoint(secret.encode(), PURPOSE, IDENTITY)
        self._listener = Listener(server, endpoint, _refuse_claim)
        self._events: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._lines: dict[int, JsonLines] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="elastic-line", daemon=True)
        self._thread.start()

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the messages that have arrived: (worker, message)."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def send(self, worker: int, message: dict[str, Any]) -> bool:
        """Sends a message. Returns False if the worker has no connection."""
        with self._lock:
            line = self._lines.get(worker)
        return line is not None and line.send(message)

    def close(self) -> None:
        """Ends all connections."""
        self._closed.set()
        self._thread.join(4 * _ACCEPT_SECS)
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            for connection, claim in self._listener.accept_callers(_ACCEPT_SECS):
                line, worker = JsonLines(connection), claim["worker"]
                with self._lock:
                    self._lines[worker] = line
                threading.Thread(target=self._read, args=[worker, line], daemon=True).start()
        self._listener.close()

    def _read(self, worker: int, line: JsonLines) -> None:
        while (message := line.receive()) is not None:
            self._events.put((worker, message))
        with self._lock:
            is_newest = self._lines.get(worker) is line
            if is_newest:
                del self._lines[worker]
        line.close()
        if is_newest:
            self._events.put((worker, {"gone": True}))


def _refuse_claim(claim: dict[str, Any]) -> ChannelRefusedError | None:
    worker = claim.get("worker")
    if isinstance(worker, int) and not isinstance(worker, bool) and worker >= 0:
        return None
    return ChannelRefusedError(f"worker {worker!r} came; expected its number")
