"""Connections from the launcher to the workers of an elastic job. Their messages become ordered events.

    for worker, message in channels.events():
        channels.send(worker, {"place": ...})

A connection belongs to its authenticated worker. Its end is the event `{"gone": True}`. A worker that sends
`{"alive": secs}` promises further messages: it is silent if none arrives for that time.
"""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ctl.io import authenticated_channel
from ctl.io.authenticated_channel import ChannelRefusedError, Listener
from ctl.io.json_lines import JsonLines
from ctl.supervision.beat_file import PollClock

PURPOSE, IDENTITY = "elastic", "launcher"
_ACCEPT_SECS = 0.5
_BACKLOG = 4096


class WorkerChannels:
    """Connections to workers: one thread that authenticates them, and one reader thread per connection."""

    def __init__(self, secret: str, host: str, clock: Callable[[], float] | None = None):
        """Binds a free port of `host`. Raises OSError if it is not an address of this machine.

        Args:
          secret: Secret of the job.
          host: An address of this machine.
          clock: Seconds. Defaults to a clock that pauses while the launcher does not run.
        """
        server = socket.create_server((host, 0), backlog=_BACKLOG)
        self.port = server.getsockname()[1]
        endpoint = authenticated_channel.Endpoint(secret.encode(), PURPOSE, IDENTITY)
        self._listener = Listener(server, endpoint, _check_claim)
        self._events: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._channels: dict[int, JsonLines] = {}
        self._clock = clock or PollClock()
        self._silence: dict[int, tuple[float, float]] = {}  # time of the newest message, and its limit
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="elastic-line", daemon=True)
        self._thread.start()

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the messages that have arrived: (worker, message). Call it regularly, for `is_silent`."""
        self._clock()  # counts at most two seconds between two calls
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def send(self, worker: int, message: dict[str, Any]) -> bool:
        """Sends a message. Returns False if the worker has no connection."""
        with self._lock:
            channel = self._channels.get(worker)
        return channel is not None and channel.send(message)

    def is_silent(self, worker: int) -> bool:
        """Returns True if a worker has sent no message within the time that it has promised."""
        now_secs = self._clock()
        received_secs, limit_secs = self._silence.get(worker, (now_secs, 0.0))
        return now_secs - received_secs > limit_secs

    def close(self) -> None:
        """Ends all connections."""
        self._closed.set()
        self._thread.join(4 * _ACCEPT_SECS)
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            for connection, claim in self._listener.accept_callers(_ACCEPT_SECS):
                channel, worker = JsonLines(connection), claim["worker"]
                with self._lock:
                    self._channels[worker] = channel
                threading.Thread(target=self._read, args=[worker, channel], daemon=True).start()
        self._listener.close()

    def _read(self, worker: int, channel: JsonLines) -> None:
        while (message := channel.receive()) is not None:
            limit_secs = message.get("alive")
            if isinstance(limit_secs, (int, float)):
                self._silence[worker] = self._clock(), limit_secs
            else:
                self._events.put((worker, message))
        with self._lock:
            is_newest = self._channels.get(worker) is channel
            if is_newest:
                del self._channels[worker]
        channel.close()
        if is_newest:
            self._events.put((worker, {"gone": True}))


def _check_claim(claim: dict[str, Any]) -> ChannelRefusedError | None:
    worker = claim.get("worker")
    if isinstance(worker, int) and not isinstance(worker, bool) and worker >= 0:
        return None
    return ChannelRefusedError(f"received the worker {worker!r}; expected its number")
