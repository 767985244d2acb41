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
from ctl.collectives import bootstrap, inline, requests, transfers
from ctl.collectives.arithmetic import SUM
from ctl.collectives.coordinator import PAUSE_SECS, Coordinator
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.failures import failure
from ctl.collectives.frames import Channel, Lost, wait_until_received
from ctl.collectives.mesh import Mesh
from ctl.collectives.outgoing import Outgoing
from ctl.collectives.pending import Pending, Plane, split_pending
from ctl.collectives.ranks import Ranks
from ctl.collectives.requests import Layout, Request
from ctl.collectives.settings import Settings
from ctl.collectives.timeline import Timeline

_MOST_INLINE = 128 << 10  # bytes of all ranks; smaller collectives are executed by the coordinator
_TINY = 256  # bytes; larger all-reduces are fused and sent between the ranks
_LEAVE_SECS = 5.0  # without progress
_JOIN_SECS = 0.1
_WAKE_SECS = 1.0
_SIGNS = 4  # heartbeats within the limit for silence
_ANSWER_SECS = 10.0  # for rank 0 to report missing ranks
_HAS_LEFT = "this rank has left (hvd.shutdown())."


class Engine:
    """Collectives runtime of one rank. All ranks create it at the same time.

    Args:
      place: Ranks of this process.
      settings: Timeouts, fusion and data plane.
      lost: Returns the launcher's message about a rank that failed to start, or an empty string.
      server: Socket that listens at this rank's address. None creates one.

    Attributes:
      all_share_memory: True if all ranks exchange large tensors through memory; see `agree_on_paths`.
    """

    def __init__(
        self,
        place: Ranks,
        settings: Settings,
        lost: Callable[[], str] = str,
        server: socket.socket | None = None,
    ):
        self.place = place
        self.settings = settings
        self.timeline = Timeline()
        self.plane: Plane | None = None
        self.all_share_memory = False
        self._next_number = 0
        self._pending: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._broken: BaseException | None = None
        self._left = False
        self._is_released = False  # rank 0 has released this rank: no collective is pending
        self._is_ending = False  # rank 0 has left; its process may end
        self._coordinator: Coordinator | None = None
        self._most_inline = _MOST_INLINE // place.size
        if place.size == 1:
            return
        found = bootstrap.connect_ranks(place, settings, lost, server)
        self._control = Channel(found.control)
        self._heard_at = self._shown_at = self._awake_at = time.monotonic()
        self._outgoing = Outgoing(self._control)
        try:
            self._mesh = Mesh(place.rank, found.peers, found.control, self._pump, self._show_life, settings)
        except Lost as e:
            found.close()
            raise HorovodInternalError(f"rank {e.args[1]} is gone ({e.args[0]}).") from e
        if place.rank == 0:
            self._coordinator = Coordinator(found.accepted, settings, self.timeline)
            self._coordinator.start()
        self._to_begin: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="hvd-engine", daemon=True)
        self._thread.start()

    def agree_on_paths(self) -> None:
        """Sets `all_share_memory` to the same value on all ranks. All ranks call it."""
        paths = [] if self.place.size == 1 else list(self._mesh.paths.values())
        others = np.array([sum(path != "memory" for path in paths)])
        self.all_share_memory = not self.sum("ctl.paths", others).any()

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks: tensors, requests, and the responses of rank 0."""
        if self.place.size == 1:
            return 0
        if self._coordinator is None:
            return self._mesh.bytes_sent + self._control.bytes_sent
        others = range(1, self.place.size)
        return self._mesh.bytes_sent + sum(map(self._coordinator.bytes_sent, others))

    def ask(
        self,
        kind: str,
        name: str,
        arrays: Sequence[np.ndarray] = (),
        joined: Layout | None = None,
        tensors: Sequence[Any] = (),
        may_wait: bool = False,
        **more: Any,
    ) -> Pending:
        """Requests a collective and returns at once. Raises the group's error if it has failed.

        Args:
          kind, name: See `Request`.
          arrays: Contiguous arrays, which must not change before the end of the collective.
          joined: Layout of the tensors that are concatenated in `arrays`.
          tensors: Flat tensors of the plane, instead of `arrays`.
          may_wait: True if a small request may be delayed and sent in a batch.
          more: Further fields of `Request`.
        """
        flat = [array.reshape(-1) for array in arrays]
        layout = joined or Layout(tuple(a.dtype.name for a in arrays), tuple(a.shape for a in arrays))
        size = sum(array.nbytes for array in flat)
        later = size <= self._most_inline and may_wait and bool(self._pending)
        fuses = later and kind == "allreduce" and size > _TINY
        request = Request(
            id=self._numbered(1 + len(more.get("names", ()))),
            name=name,
            kind=kind,
            dtypes=layout.dtypes,
            shapes=layout.shapes,
            is_inline=size <= self._most_inline and not fuses and not tensors,
            plane="tensorflow" if tensors else "",
            **more,
        )
        pending = Pending(request, flat, tensors=tensors)
        if self.place.size == 1:
            _carry_out_alone(pending)
            return pending
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._pending[request.id] = pending
        payload = [array.view(np.uint8) for array in flat] if request.is_inline else []
        with contextlib.suppress(Lost):  # the engine's thread handles the loss when it reads
            self._outgoing.put(request, payload, later=later)
        return pending

    def _numbered(self, count: int) -> int:
        """Reserves `count` numbers that are unique on this rank and returns the first one."""
        with self._lock:
            first, self._next_number = self._next_number, self._next_number + count
        return first

    def wait(self, pending: Pending) -> Sequence[np.ndarray]:
        """Returns the flat results. Raises the error of the collective."""
        pending.wait()
        if pending.error is not None:
            raise pending.error
        return pending.result

    def sum(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns the sum of `values` `[n]` over the ranks, without TensorFlow. Raises its error."""
        (total,) = self.wait(self.ask("allreduce", name, [values], op=SUM, is_eager=False))
        return total

    def lose(self, why: str) -> None:
        """Fails all pending collectives after the launcher has detected the loss of a rank."""
        self._break(failure("LOST", why))

    def close(self, *, linger: bool = False) -> None:
        """Leaves the group and notifies the ranks. With `linger`, rank 0 waits for all of them.

        Returns when the other ranks have received the data of this rank for all complete collectives, or
        when no byte was transferred for some seconds.
        """
        if self.place.size == 1:
            self.timeline.stop()
            return
        with self._lock:
            self._left = True
            is_whole = self._broken is None
            self._broken = self._broken or failure("LOST", _HAS_LEFT)
        with contextlib.suppress(Lost):
            self._outgoing.flush()
            self._control.send({"type": "leave"})
        left_at = time.monotonic()
        while self._thread.is_alive() and time.monotonic() < _LEAVE_SECS + max(
            left_at, self._mesh.moved_at
        ):
            self._thread.join(_JOIN_SECS)
        sockets = self._mesh.sockets
        if self._coordinator is not None:
            self._coordinator.join(_LEAVE_SECS if linger else 0.2)
            sockets += self._coordinator.remote_sockets
        if is_whole:
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
                self._wait_for_word()
                self._control.inbox.read(self._control.socket)
                self._heed()
                with contextlib.suppress(Lost):  # the next read raises the error
                    self._outgoing.flush()
                while self._to_begin:
                    self._begin(self._to_begin.pop(0))
            self._break(failure("LOST", _HAS_LEFT))
        except Lost as e:
            rank = e.args[1] if len(e.args) > 1 else 0
            why = f"rank {rank} is gone ({e.args[0]})."
            if len(e.args) > 1 and not self._left:
                self._report(rank, why)
            self._break(failure("LOST", why))
        except _Broken as e:
            self._break(failure("LOST", str(e)))
        except BaseException as e:  # waiting threads need the error
            self._break(failure("LOST", f"rank {self.place.rank}: {type(e).__name__}: {e}"))
            self._report(self.place.rank, f"rank {self.place.rank} failed: {e}")

    def _wait_for_word(self) -> None:
        """Waits for a message of rank 0. It sends some regularly if stalls or silence are limited."""
        shutdown_secs = 0.0 if self.place.rank == 0 else self.settings.stall_shutdown
        poller, waited_at = select.poll(), time.monotonic()
        control = self._control.socket.fileno()
        for descriptor in (control, self._outgoing.descriptor):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = dict(poller.poll(1000 * _WAKE_SECS))
            if self._outgoing.waits and control not in ready:  # further requests may join the batch
                time.sleep(self.settings.cycle)
                with contextlib.suppress(Lost):
                    self._outgoing.flush()
            self._show_life()
            if control in ready:
                return
            with self._lock:
                asked_at = [pending.asked_at for pending in self._pending.values()]
            silent_secs = time.monotonic() - max(waited_at, min(asked_at, default=math.inf))
            if shutdown_secs and silent_secs > shutdown_secs + _ANSWER_SECS:
                raise _Broken(
                    f"rank 0 did not answer for {silent_secs:.0f} s ({self.settings.stall_name})."
                )

    def _show_life(self) -> None:
        """Sends heartbeats to rank 0 and checks its silence, if there is a limit for silence."""
        limit_secs, now = self.settings.silence, time.monotonic()
        if now - self._awake_at > PAUSE_SECS:  # this process was stopped, and perhaps the other ranks too
            self._heard_at += now - self._awake_at
        self._awake_at = now
        if not limit_secs or now - self._shown_at < limit_secs / _SIGNS:
            return
        self._shown_at = now
        with contextlib.suppress(Lost):
            self._control.send({"type": "alive"})
        if now - self._heard_at > limit_secs and not self._is_ending:
            raise _Broken(f"rank 0 has been silent for {now - self._heard_at:.0f} s.")

    def _report(self, rank: int, why: str) -> None:
        with contextlib.suppress(Lost):
            self._control.send({"type": "broken", "rank": rank, "why": why})

    def _pump(self) -> bool:
        """Reads the coordinator's messages during an exchange. Returns False at the connection's end."""
        try:
            self._control.inbox.read(self._control.socket)
            self._heed()
        except Lost:
            if not (self._is_ending or self._is_released):
                raise
            return False
        return True

    def _heed(self) -> None:
        self._heard_at = time.monotonic()
        for header, payload in self._control.inbox.messages():
            kind = header["type"]
            if kind == "begin":
                self._to_begin.append(header)
            elif kind == "result":
                pending = self._taken(header["id"])
                pending.more = header
                pending.result = inline.results_of(pending.request, pending.arrays, header, payload)
                self.timeline.did(pending.request.name, pending.request.kind, pending.asked_at)
                pending.finish()
            elif kind == "alive":
                continue
            elif kind == "left":
                self._is_released = True
            elif kind == "ending":
                self._is_ending = True
            elif kind == "split":
                parts = split_pending(self._taken(header["id"]), self.plane)
                with self._lock:
                    self._pending.update({part.request.id: part for part in parts})
            elif kind == "error":
                pending = self._taken(header["id"])
                pending.error = failure(header["code"], header["text"])
                pending.finish()
            else:
                raise _Broken(header["why"])

    def _taken(self, number: int) -> Pending:
        with self._lock:
            return self._pending.pop(number)

    def _begin(self, header: dict[str, Any]) -> None:
        start = time.monotonic()
        found = [self._pending[number] for number in header["ids"]]
        if self.plane is not None and found[0].tensors:
            self.plane.begin(found, header)
            return
        ranks = header["ranks"]
        results = transfers.carried_out(
            self._mesh,
            ranks,
            ranks.index(self.place.rank),
            header,
            [(pending.request, pending.arrays) for pending in found],
        )
        for pending, result in zip(found, results, strict=True):
            self._taken(pending.request.id)
            pending.result, pending.more = result, header
            self.timeline.did(pending.request.name, pending.request.kind, start)
            pending.finish()

    def finish(self, number: int, **outcome: Any) -> None:
        """Finishes a collective of the plane with a result or an error. A no-op after a failure."""
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            for name, value in outcome.items():
                setattr(pending, name, value)
            self.timeline.did(pending.request.name, pending.request.kind, pending.asked_at)
            pending.finish()

    def _break(self, error: BaseException) -> None:
        with self._lock:
            self._broken = self._broken or error
            waiting, self._pending = list(self._pending.values()), {}
        if self.plane is not None and any(pending.tensors for pending in waiting):
            self.plane.abort(str(error))
        for pending in waiting:
            pending.error = self._broken
            pending.finish()


def _carry_out_alone(pending: Pending) -> None:
    request = pending.request
    fault = requests.fault([0], {0: request})
    if fault:
        pending.error = failure(*fault)
    else:
        pending.result = [array.copy() for array in pending.arrays]
        pending.more = {
            "rows": [[s[0] if s else 1 for s in request.shapes]],
            "splits": [list(request.splits)],
            "number": -1,
        }
    pending.finish()


class _Broken(Exception):
    """The group has failed: a rank or the coordinator is lost."""
