"""The launcher's end of the lines to its processes: what they say becomes events, in order.

    service = Service(secret, host="127.0.0.1")
    service.port
    for worker, message in service.events():
        service.send(worker, {"place": ...})
    service.close()

A connection belongs to the worker that said hello on it; its end is the event `{"gone": True}`.
"""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

from ctl.runner.wire import Line, RefusedLine, answer

_STRANGERS = 256  # connections that have not shown yet that they know the secret


class Service:
    """Listens in a thread, and reads each connection in one more."""

    def __init__(self, secret: str, host: str):
        """Binds a free port of `host`; OSError when it is no address of this machine."""
        self._secret = secret
        self._socket = socket.create_server((host, 0))
        self.port = self._socket.getsockname()[1]
        self._events: queue.SimpleQueue[tuple[int, dict]] = queue.SimpleQueue()
        self._lines: dict[int, Line] = {}
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def events(self) -> Iterator[tuple[int, dict]]:
        """What has come by now: (worker, message)."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._events.get_nowait()

    def send(self, worker: int, message: dict) -> bool:
        """False when the worker has no connection."""
        with self._lock:
            line = self._lines.get(worker)
        return line is not None and line.send(message)

    def close(self) -> None:
        """Ends all connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                accepted.close()
                continue
            threading.Thread(target=self._serve, args=[accepted], daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            line, hello = answer(accepted, self._secret)
        except (RefusedLine, OSError):
            accepted.close()
            return
        finally:
            self._strangers.release()
        worker = hello.get("worker")
        if not isinstance(worker, int):
            line.close()
            return
        with self._lock:
            self._lines[worker] = line
        while (message := line.receive()) is not None:
            self._events.put((worker, message))
        with self._lock:
            is_newest = self._lines.get(worker) is line
            if is_newest:
                del self._lines[worker]
        line.close()
        if is_newest:
            self._events.put((worker, {"gone": True}))
