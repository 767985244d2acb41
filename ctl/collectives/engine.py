"""Collectives runtime of one rank.

The engine sends requests to the coordinator on rank 0 and executes the collectives that it schedules.
"""

import contextlib
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ctl.collectives import bootstrap, inline, transfers
from ctl.collectives.arithmetic import MAX, SUM, dtype_name
from ctl.collectives.control_tree import ControlTree
from ctl.collectives.coordinator import Coordinator
from ctl.collectives.coordinator_link import CoordinatorLink
from ctl.collectives.errors import HorovodInternalError, create_error
from ctl.collectives.frames import Lost, wait_until_received
from ctl.collectives.heartbeats import GroupFailedError
from ctl.collectives.late_links import LateLinks
from ctl.collectives.mesh import Mesh
from ctl.collectives.network_measurement import measure_network
from ctl.collectives.pending import CreateError, Pending, Plane, execute_alone, split_pending
from ctl.collectives.ranks import Ranks
from ctl.collectives.relays import start_relay
from ctl.collectives.repetition import RepeatedUnit, Repetition
from ctl.collectives.requests import Layout, Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline
from ctl.collectives.transfer_costs import ONE_MACHINE, NetworkCosts

_MAX_INLINE_BYTES = 128 << 10  # bytes of all ranks; smaller collectives are executed by the coordinator
_MIN_FUSED_BYTES = 256  # bytes; larger all-reduces are fused and sent between the ranks
_LEAVE_SECS = 5.0  # limit of a shutdown without progress
_JOIN_SECS = 0.1
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
      all_share_memory: True if all ranks exchange large tensors through memory. Set by `agree_on_links`.
      network: Costs from which the ranks select algorithms. Set by `agree_on_links`.
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
        self.all_share_memory, self.network = False, ONE_MACHINE
        self._measured_network = ONE_MACHINE
        self._next_number = 0
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._has_left = False
        self._coordinator: Coordinator | None = None
        self._max_inline_bytes = _MAX_INLINE_BYTES // ranks.size
        if ranks.size == 1:
            return
        connections = bootstrap.connect_ranks(ranks, settings, lost, server)
        tree = ControlTree(ranks.size, settings.fanout)
        control, self._relay = start_relay(tree, ranks.rank, connections.control, connections.accepted)
        parent = tree.parent(ranks.rank)
        self._control = CoordinatorLink(control, ranks.rank, settings, self._handle_message, parent)
        self._scheduled: deque[dict[str, Any]] = deque()  # messages of rank 0 to execute in order
        send, receive = self._control.channel.send, self._control.wait_and_read
        self._repetition = Repetition(
            self._control.outgoing, self._scheduled, send, receive, self._execute_unit, self._finish_pending
        )
        self._late_links = LateLinks(ranks, settings, send, receive)
        try:
            self._mesh = Mesh(
                ranks.rank,
                connections.peers,
                control,
                self._control.read_during_exchange,
                self._check_progress,
                settings,
                self._late_links,
                ranks.machine_by_rank,
            )
            self._measured_network = measure_network(self._mesh, ranks)
        except Lost as e:
            control.close()
            if self._relay is not None:
                self._relay.end()
            connections.close()
            raise HorovodInternalError(f"rank {e.args[1]} is gone ({e.args[0]}).") from e
        if ranks.rank == 0:
            self._coordinator = Coordinator(connections.accepted, settings, self.timeline, tree)
            self._coordinator.start()
        self._thread = threading.Thread(target=self._run, name="hvd-engine", daemon=True)
        self._thread.start()

    def agree_on_links(self, network: NetworkCosts | None = None) -> None:
        """Sets `all_share_memory` and `network` to the same values on all ranks. Collective.

        Args:
          network: Costs from which later collectives select algorithms. None: the measured ones.
        """
        paths = [] if self.ranks.size == 1 else list(self._mesh.paths.values())
        costs = self._measured_network.rounded() if network is None else network
        values = np.array([sum(path != "memory" for path in paths), *costs])
        (maxima,) = self.wait(self.submit("allreduce", "ctl.links", [values], op=MAX, is_eager=False))
        self.all_share_memory, self.network = not maxima[0], NetworkCosts(*maxima[1:].tolist())
        if self._coordinator is not None:
            self._control.channel.send({"type": "network", **self.network.header()})

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks: tensors, requests, and the responses of rank 0."""
        if self.ranks.size == 1:
            return 0
        if self._coordinator is None:
            return self._mesh.bytes_sent + self._control.channel.bytes_sent
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
        dtypes = tuple(dtype_name(array.dtype) for array in arrays)
        layout = joined or Layout(dtypes, tuple(array.shape for array in arrays))
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
        with contextlib.suppress(Lost):  # the engine's thread handles the loss when it reads
            self._control.outgoing.put(request, _payload(pending), is_delayed=is_delayed)
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
        """Leaves the group and notifies the other ranks.

        With `linger`, a rank waits until all ranks below it have left.

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
        self._control.leave()
        left_at = time.monotonic()
        can_be_released = is_healthy or self._coordinator is not None  # rank 0 may be the lost rank
        while (
            can_be_released
            and self._thread.is_alive()
            and time.monotonic() < _LEAVE_SECS + max(left_at, self._mesh.last_transfer_at)
        ):
            self._thread.join(_JOIN_SECS)
        sockets = self._mesh.sockets
        if (intermediary := self._coordinator or self._relay) is not None:
            intermediary.join(_LEAVE_SECS if linger else 0.2)
            sockets += intermediary.remote_sockets
        if is_healthy:
            wait_until_received(sockets, _LEAVE_SECS)
        self._control.channel.end()
        self._thread.join(_LEAVE_SECS)
        self._control.close()
        self._mesh.close()
        if self.plane is not None:
            self.plane.close()
        self.timeline.stop()

    def _run(self) -> None:
        try:
            self._control.channel.socket.setblocking(True)
            while not self._control.is_released:
                if self._control.wait(lambda: self._repetition.wait_secs, self._find_first_request_time):
                    self._control.read()
                with contextlib.suppress(Lost):  # the next read raises the error
                    self._control.outgoing.flush()
                while self._scheduled:
                    self._execute_message(self._scheduled[0])
                    self._scheduled.popleft()
                    self._control.restart_wait()
                if self._repetition.advance():
                    self._control.restart_wait()
            self._fail_group(self._create_error("LOST", _HAS_LEFT))
        except Lost as e:
            rank = e.args[1] if len(e.args) > 1 else self._control.parent
            error_message = f"rank {rank} is gone ({e.args[0]})."
            if len(e.args) > 1 and not self._has_left:
                error_message = self._control.report(rank, error_message)
            self._fail_group(self._create_error("LOST", error_message))
        except GroupFailedError as e:
            self._fail_group(self._create_error("LOST", str(e)))
        except BaseException as e:  # waiting threads need the error
            self._fail_group(self._create_error("LOST", f"rank {self.ranks.rank}: {type(e).__name__}: {e}"))
            self._control.report(self.ranks.rank, f"rank {self.ranks.rank} failed: {e}")

    def _find_first_request_time(self) -> float:
        with self._lock:
            return min((pending.requested_at for pending in self._pending.values()), default=math.inf)

    def _check_progress(self) -> None:
        """Sends heartbeats during an exchange, and ends a repetition without progress."""
        self._control.heartbeats.poll()
        self._repetition.check_transfers(self._mesh.last_transfer_at)

    def _handle_message(self, header: dict[str, Any], payload: bytes) -> None:
        message_type = header["type"]
        if message_type == "stop" and self._repetition.is_repeating:
            self._repetition.stop(header)
        elif message_type in ("begin", "repeat", "stop", "resume"):
            self._scheduled.append(header)
        elif message_type == "prepare":
            self._repetition.prepare(header)
        elif message_type == "result":
            pending = self._pop_pending(header["id"])
            pending.response = header
            pending.result = inline.parse_results(pending.request, pending.arrays, header, payload)
            self._repetition.record(pending.request, pending.arrays)
            self.timeline.record_execution(pending.request.name, pending.request.kind, pending.requested_at)
            pending.finish()
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
            raise GroupFailedError(header["why"])

    def _pop_pending(self, number: int) -> Pending:
        with self._lock:
            return self._pending.pop(number)

    def _execute_message(self, header: dict[str, Any]) -> None:
        """Executes a scheduled message of rank 0."""
        message_type = header["type"]
        if message_type == "repeat":
            with self._lock:
                returned = [self._pending[number] for number in header["returned"]]
            self._repetition.start(header, [(pending.request, _payload(pending)) for pending in returned])
        elif message_type == "stop":
            self._repetition.stop(header)
        elif message_type == "resume":
            self._repetition.resume(header)
        else:
            self._begin(header)

    def _begin(self, header: dict[str, Any]) -> None:
        start_secs = time.monotonic()
        header.setdefault("ranks", range(self.ranks.size))
        pending_collectives = [self._pending[number] for number in header["ids"]]
        if self.plane is not None and pending_collectives[0].tensors:
            self.plane.begin(pending_collectives, header)
            return
        ranks, inputs = (
            header["ranks"],
            [(pending.request, pending.arrays) for pending in pending_collectives],
        )
        me = ranks.index(self.ranks.rank)
        results = transfers.execute_transfers(self._mesh, ranks, me, header, inputs)
        for pending, result in zip(pending_collectives, results, strict=True):
            self._repetition.record(pending.request, pending.arrays)
            self._finish_pending(pending.request.id, result, header, start_secs)

    def _execute_unit(self, unit: RepeatedUnit, ids: Sequence[int] | None) -> list[list[np.ndarray]]:
        """Executes collectives of a repeated sequence, with zeros instead of `ids` None."""
        arrays = unit.zeros() if ids is None else [self._pending[number].arrays for number in ids]
        inputs = list(zip(unit.requests, arrays, strict=True))
        ranks, header = range(self.ranks.size), dict(unit.selection)
        return transfers.execute_transfers(self._mesh, ranks, self.ranks.rank, header, inputs)

    def _finish_pending(
        self,
        number: int,
        result: list[np.ndarray],
        response: dict[str, Any] | None = None,
        start_secs: float | None = None,
    ) -> None:
        pending = self._pop_pending(number)
        start_secs = start_secs or pending.requested_at
        pending.result, pending.response = result, response
        self.timeline.record_execution(pending.request.name, pending.request.kind, start_secs)
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
        if self.ranks.size > 1 and not self._has_left:
            self._mesh.record_failure()
        with self._lock:
            self._failure = self._failure or error
            pending_collectives, self._pending = list(self._pending.values()), {}
        if self.plane is not None and any(pending.tensors for pending in pending_collectives):
            self.plane.abort(str(error))
        for pending in pending_collectives:
            pending.error = self._failure
            pending.finish()


def _payload(pending: Pending) -> list[np.ndarray]:
    """Returns the data of an inline request."""
    return [array.view(np.uint8) for array in pending.arrays] if pending.request.is_inline else []
