"""Collectives runtime of one rank.

The engine sends requests to the coordinator on rank 0 and executes the collectives that it schedules.
"""

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ctl.collectives import bootstrap, inline, transfers
from ctl.collectives.arithmetic import SUM
from ctl.collectives.coordinator import PAUSE_SECS, Coordinator
from ctl.collectives.errors import HorovodInternalError, create_error
from ctl.collectives.frames import Channel, Lost, wait_until_received
from ctl.collectives.late_links import LateLinks
from ctl.collectives.mesh import Mesh
from ctl.collectives.outgoing import Outgoing
from ctl.collectives.pending import CreateError, Pending, Plane, execute_alone, split_pending
from ctl.collectives.ranks import Ranks
from ctl.collectives.requests import Layout, Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline

_MAX_INLINE_BYTES = 128 << 10  # bytes of all ranks; smaller collectives are executed by the coordinator
_MIN_FUSED_BYTES = 256  # bytes; larger all-reduces are fused and sent between the ranks
_LEAVE_SECS = 5.0  # limit of a shutdown without progress
_JOIN_SECS = 0.1
_WAKE_SECS = 1.0
_HEARTBEATS_PER_TIMEOUT = 4
_ANSWER_SECS = 10.0  # additional time for rank 0 to report missing ranks
_HAS_LEFT = "this rank has left (hvd.shutdown())."


class Engine:
    """Collectives runtime of one rank. The constructor blocks until all ranks have connected.

    Args:
      ranks: Ranks of this process.
      settings: Timeouts, fusion and data plane.
      lost: Returns the launcher's message about a rank that failed to start, or an empty string.
      server: Socket that listens at this rank's address. None creates one.
      create_error: Creates the exceptions of collectives from an error code and a message.

    Attributes:
      all_share_memory: True if all ranks exchange large tensors through memory. Set by `agree_on_paths`.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        lost: Callable[[], str] = str,
        server: socket.socket | None = None,
        create_error: CreateError = create_error,
    ):
        self._create_error = create_error
        self.ranks = ranks
        self.settings = settings
        self.timeline = Timeline()
        self.plane: Plane | None = None
        self.all_share_memory = False
        self._next_number = 0
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._has_left = False
        self._is_released = False  # rank 0 has released this rank: no collective is pending
        self._is_ending = False  # rank 0 has left; its process may end
        self._coordinator: Coordinator | None = None
        self._max_inline_bytes = _MAX_INLINE_BYTES // ranks.size
        if ranks.size == 1:
            return
        connections = bootstrap.connect_ranks(ranks, settings, lost, server)
        self._control = Channel(connections.control)
        self._last_received_at = self._last_heartbeat_at = self._last_poll_at = time.monotonic()
        self._outgoing = Outgoing(self._control)
        self._late_links = LateLinks(ranks, settings, self._control.send, self._receive_while_connecting)
        try:
            self._mesh = Mesh(
                ranks.rank,
                connections.peers,
                connections.control,
                self._receive_control,
                self._send_heartbeat,
                settings,
                self._late_links,
            )
        except Lost as e:
            connections.close()
            raise HorovodInternalError(f"rank {e.args[1]} is gone ({e.args[0]}).") from e
        if ranks.rank == 0:
            self._coordinator = Coordinator(connections.accepted, settings, self.timeline)
            self._coordinator.start()
        self._begin_queue: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="hvd-engine", daemon=True)
        self._thread.start()

    def agree_on_paths(self) -> None:
        """Sets `all_share_memory` to the same value on all ranks. Collective."""
        paths = [] if self.ranks.size == 1 else list(self._mesh.paths.values())
        num_socket_paths = np.array([sum(path != "memory" for path in paths)])
        self.all_share_memory = not self.sum("ctl.paths", num_socket_paths).any()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks: tensors, requests, and the responses of rank 0."""
        if self.ranks.size == 1:
            return 0
        if self._coordinator is None:
            return self._mesh.bytes_sent + self._control.bytes_sent
        other_ranks = range(1, self.ranks.size)
        return self._mesh.bytes_sent + sum(map(self._coordinator.bytes_sent, other_ranks))

    def submit(
        self,
        collective_kind: str,
        name: str,
        arrays: Sequence[np.ndarray] = (),
        joined: Layout | None = None,
        tensors: Sequence[Any] = (),
        may_wait: bool = False,
        **fields: Any,
    ) -> Pending:
        """Requests a collective without blocking. Raises the error of the group if it has failed.

        Args:
          collective_kind: `Request.kind`.
          name: `Request.name`.
          arrays: Contiguous arrays, which must not change before the end of the collective.
          joined: Layout of the tensors that are concatenated in `arrays`.
          tensors: Flat tensors of the plane, instead of `arrays`.
          may_wait: True if a small request may be delayed and sent in a batch.
          **fields: Further fields of `Request`.
        """
        flat = [array.reshape(-1) for array in arrays]
        layout = joined or Layout(tuple(a.dtype.name for a in arrays), tuple(a.shape for a in arrays))
        num_bytes = sum(array.nbytes for array in flat)
        is_delayed = num_bytes <= self._max_inline_bytes and may_wait and bool(self._pending)
        is_fusible = is_delayed and collective_kind == "allreduce" and num_bytes > _MIN_FUSED_BYTES
        request = Request(
            id=self._reserve_numbers(1 + len(fields.get("names", ()))),
            name=name,
            kind=collective_kind,
            dtypes=layout.dtypes,
            shapes=layout.shapes,
            is_inline=num_bytes <= self._max_inline_bytes and not is_fusible and not tensors,
            plane="tensorflow" if tensors else "",
            **fields,
        )
        pending = Pending(request, flat, tensors=tensors)
        if self.ranks.size == 1:
            execute_alone(pending, self._create_error)
            return pending
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._pending[request.id] = pending
        payload = [array.view(np.uint8) for array in flat] if request.is_inline else []
        with contextlib.suppress(Lost):  # the engine's thread handles the loss when it reads
            self._outgoing.put(request, payload, is_delayed=is_delayed)
        return pending

    def _reserve_numbers(self, count: int) -> int:
        """Reserves `count` numbers that are unique on this rank and returns the first one."""
        with self._lock:
            first, self._next_number = self._next_number, self._next_number + count
        return first

    def wait(self, pending: Pending) -> Sequence[np.ndarray]:
        """Blocks until a collective has finished and returns its flat results. Raises its error."""
        pending.wait()
        if pending.error is not None:
            raise pending.error
        return pending.result

    def sum(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns the sum of `values` `[n]` over the ranks, computed without TensorFlow. Blocks."""
        (total,) = self.wait(self.submit("allreduce", name, [values], op=SUM, is_eager=False))
        return total

    def fail_all(self, error_message: str) -> None:
        """Fails all pending and later collectives, because the launcher has detected a lost rank."""
        self._fail_group(self._create_error("LOST", error_message))

    def close(self, *, linger: bool = False) -> None:
        """Leaves the group and notifies the other ranks. With `linger`, rank 0 waits until all have left.

        Blocks until the other ranks have received the data of this rank for all scheduled collectives, or
        until no byte was transferred for some seconds.
        """
        if self.ranks.size == 1:
            self.timeline.stop()
            return
        with self._lock:
            self._has_left = True
            is_healthy = self._failure is None
            self._failure = self._failure or self._create_error("LOST", _HAS_LEFT)
        with contextlib.suppress(Lost):
            self._outgoing.flush()
            self._control.send({"type": "leave"})
        left_at = time.monotonic()
        while self._thread.is_alive() and time.monotonic() < _LEAVE_SECS + max(
            left_at, self._mesh.last_transfer_at
        ):
            self._thread.join(_JOIN_SECS)
        sockets = self._mesh.sockets
        if self._coordinator is not None:
            self._coordinator.join(_LEAVE_SECS if linger else 0.2)
            sockets += self._coordinator.remote_sockets
        if is_healthy:
            wait_until_received(sockets, _LEAVE_SECS)
        self._control.end()
        self._thread.join(_LEAVE_SECS)
        self._control.close()
        self._outgoing.close()
        self._mesh.close()
        if self.plane is not None:
            self.plane.close()
        self.timeline.stop()

    def _run(self) -> None:
        try:
            self._control.socket.setblocking(True)
            while not self._is_released:
                self._wait_for_message()
                self._control.inbox.read(self._control.socket)
                self._process_messages()
                with contextlib.suppress(Lost):  # the next read raises the error
                    self._outgoing.flush()
                while self._begin_queue:
                    self._begin(self._begin_queue.pop(0))
            self._fail_group(self._create_error("LOST", _HAS_LEFT))
        except Lost as e:
            rank = e.args[1] if len(e.args) > 1 else 0
            error_message = f"rank {rank} is gone ({e.args[0]})."
            if len(e.args) > 1 and not self._has_left:
                self._report(rank, error_message)
            self._fail_group(self._create_error("LOST", error_message))
        except _GroupFailedError as e:
            self._fail_group(self._create_error("LOST", str(e)))
        except BaseException as e:  # waiting threads need the error
            self._fail_group(self._create_error("LOST", f"rank {self.ranks.rank}: {type(e).__name__}: {e}"))
            self._report(self.ranks.rank, f"rank {self.ranks.rank} failed: {e}")

    def _wait_for_message(self) -> None:
        """Waits for a message of rank 0. Raises an error if a collective exceeds the stall limit."""
        shutdown_secs = 0.0 if self.ranks.rank == 0 else self.settings.stall_shutdown
        poller, waited_at = select.poll(), time.monotonic()
        control = self._control.socket.fileno()
        for descriptor in (control, self._outgoing.descriptor):
            poller.register(descriptor, select.POLLIN)
        while True:
            events = dict(poller.poll(1000 * _WAKE_SECS))
            if self._outgoing.has_queued and control not in events:  # further requests may join the batch
                time.sleep(self.settings.cycle)
                with contextlib.suppress(Lost):
                    self._outgoing.flush()
            self._send_heartbeat()
            if control in events:
                return
            with self._lock:
                request_times = [pending.requested_at for pending in self._pending.values()]
            silent_secs = time.monotonic() - max(waited_at, min(request_times, default=math.inf))
            if shutdown_secs and silent_secs > shutdown_secs + _ANSWER_SECS:
                raise _GroupFailedError(
                    f"rank 0 has not responded for {silent_secs:.0f} s ({self.settings.stall_name})."
                )

    def _send_heartbeat(self) -> None:
        """Sends heartbeats to rank 0. Raises an error if rank 0 exceeds the heartbeat timeout."""
        limit_secs, now_secs = self.settings.heartbeat_timeout, time.monotonic()
        if now_secs - self._last_poll_at > PAUSE_SECS:  # this process was stopped; other ranks may be too
            self._last_received_at += now_secs - self._last_poll_at
        self._last_poll_at = now_secs
        if not limit_secs or now_secs - self._last_heartbeat_at < limit_secs / _HEARTBEATS_PER_TIMEOUT:
            return
        self._last_heartbeat_at = now_secs
        with contextlib.suppress(Lost):
            self._control.send({"type": "alive"})
        silent_secs = now_secs - self._last_received_at
        if silent_secs > limit_secs and not self._is_ending:
            raise _GroupFailedError(f"rank 0 has been silent for {silent_secs:.0f} s.")

    def _report(self, rank: int, error_message: str) -> None:
        with contextlib.suppress(Lost):
            self._control.send({"type": "broken", "rank": rank, "why": error_message})

    def _receive_control(self) -> bool:
        """Processes the coordinator's messages during an exchange. Returns False if it has disconnected."""
        try:
            self._control.inbox.read(self._control.socket)
            self._process_messages()
        except Lost:
            if not (self._is_ending or self._is_released):
                raise
            return False
        return True

    def _receive_while_connecting(self, wait_secs: float) -> None:
        """Processes the coordinator's messages, and waits for them at most `wait_secs`."""
        poller = select.poll()
        poller.register(self._control.socket.fileno(), select.POLLIN)
        if poller.poll(1000 * wait_secs) and not self._receive_control():
            raise Lost("it has left", 0)
        self._send_heartbeat()

    def _process_messages(self) -> None:
        self._last_received_at = time.monotonic()
        for header, payload in self._control.inbox.messages():
            message_type = header["type"]
            if message_type == "begin":
                self._begin_queue.append(header)
            elif message_type == "result":
                pending = self._pop_pending(header["id"])
                pending.response = header
                pending.result = inline.parse_results(pending.request, pending.arrays, header, payload)
                self.timeline.record_execution(
                    pending.request.name, pending.request.kind, pending.requested_at
                )
                pending.finish()
            elif message_type == "alive":
                continue
            elif message_type == "left":
                self._is_released = True
            elif message_type == "ending":
                self._is_ending = True
            elif message_type == "ports":
                self._late_links.receive_ports(header)
            elif message_type == "split":
                parts = split_pending(self._pop_pending(header["id"]), self.plane)
                with self._lock:
                    self._pending.update({part.request.id: part for part in parts})
            elif message_type == "error":
                pending = self._pop_pending(header["id"])
                pending.error = self._create_error(header["code"], header["text"])
                pending.finish()
            else:
                raise _GroupFailedError(header["why"])

    def _pop_pending(self, number: int) -> Pending:
        with self._lock:
            return self._pending.pop(number)

    def _begin(self, header: dict[str, Any]) -> None:
        start = time.monotonic()
        pending_collectives = [self._pending[number] for number in header["ids"]]
        if self.plane is not None and pending_collectives[0].tensors:
            self.plane.begin(pending_collectives, header)
            return
        ranks = header["ranks"]
        results = transfers.execute_transfers(
            self._mesh,
            ranks,
            ranks.index(self.ranks.rank),
            header,
            [(pending.request, pending.arrays) for pending in pending_collectives],
        )
        for pending, result in zip(pending_collectives, results, strict=True):
            self._pop_pending(pending.request.id)
            pending.result, pending.response = result, header
            self.timeline.record_execution(pending.request.name, pending.request.kind, start)
            pending.finish()

    def finish(self, number: int, **outcome: Any) -> None:
        """Finishes a collective that the plane has executed. A no-op if the group has failed.

        Args:
          number: `Request.id` of the collective.
          **outcome: Attributes of `Pending` to set: `result` and `response`, or `error`.
        """
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            for name, value in outcome.items():
                setattr(pending, name, value)
            self.timeline.record_execution(pending.request.name, pending.request.kind, pending.requested_at)
            pending.finish()

    def _fail_group(self, error: BaseException) -> None:
        if not self._has_left:
            self._mesh.record_failure()
        with self._lock:
            self._failure = self._failure or error
            pending_collectives, self._pending = list(self._pending.values()), {}
        if self.plane is not None and any(pending.tensors for pending in pending_collectives):
            self.plane.abort(str(error))
        for pending in pending_collectives:
            pending.error = self._failure
            pending.finish()


class _GroupFailedError(Exception):
    """Error after the loss of a rank or of the coordinator."""
