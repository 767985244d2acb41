"""Large tensors between ranks: each sends to one neighbour while it receives from another."""

import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ctl.collectives.frames import Lost

_AT_ONCE = 1 << 20
_WAKE_SECS = 1.0


class Mesh:
    """Sockets to the other ranks, used by one thread at a time.

    Args:
      peers: rank -> connected socket.
      control: socket that is watched meanwhile, with
      pump: what reads it; it raises to end an exchange.
      stall_warning: seconds without a byte until somebody is told; 0 for never.
      stall_shutdown: seconds without a byte until the other rank counts as lost; 0 for never.
    """

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        control: socket.socket,
        pump: Callable[[], None],
        stall_warning: float,
        stall_shutdown: float,
    ):
        self._peers = dict(peers)
        self._control = control
        self._pump = pump
        self._stall_warning = stall_warning
        self._stall_shutdown = stall_shutdown
        self._scratch = np.empty(0, np.uint8)
        for sock in self._peers.values():
            sock.setblocking(False)

    def scratch(self, size: int) -> np.ndarray:
        """At least `size` bytes, the same again and again: new memory costs more than a sum."""
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch

    def exchange(self, to: int, out: np.ndarray, source: int, into: np.ndarray) -> None:
        """Sends the array `out` to one rank while it fills the array `into` from another.

        Raises Lost, with the rank as its second argument, if one of the two is gone.
        """
        sending, receiving = _raw(out), _raw(into)
        sender, receiver = self._peers[to], self._peers[source]
        sent = received = 0
        moved_at = told_at = time.monotonic()
        poller = self._poller(receiver if receiving else None, sender if sending else None)
        while sent < len(sending) or received < len(receiving):
            ready = dict(poller.poll(1000 * _WAKE_SECS))
            is_left = received < len(receiving), sent < len(sending)
            if is_left[0] and ready.get(receiver.fileno(), 0) & ~select.POLLOUT:
                received += self._received(receiver, receiving[received:], source)
                moved_at = time.monotonic()
            if is_left[1] and ready.get(sender.fileno(), 0) & ~select.POLLIN:
                sent += self._sent(sender, sending[sent : sent + _AT_ONCE], to)
                moved_at = time.monotonic()
            if self._control.fileno() in ready:
                self._pump()
            if is_left != (received < len(receiving), sent < len(sending)):
                poller = self._poller(
                    receiver if received < len(receiving) else None, sender if sent < len(sending) else None
                )
            elif not ready:
                told_at = self._tell(moved_at, told_at, source if received < len(receiving) else to)

    def _poller(self, receiver: socket.socket | None, sender: socket.socket | None) -> select.poll:
        """For descriptors of any number, which `select.select` does not take."""
        wanted = {self._control.fileno(): select.POLLIN}
        if receiver is not None:
            wanted[receiver.fileno()] = select.POLLIN
        if sender is not None:
            wanted[sender.fileno()] = wanted.get(sender.fileno(), 0) | select.POLLOUT
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        return poller

    def close(self) -> None:
        """Ends all connections."""
        for sock in self._peers.values():
            sock.close()

    def _received(self, sock: Any, into: memoryview, rank: int) -> int:
        try:
            count = sock.recv_into(into)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as e:
            raise Lost(str(e), rank) from e
        if not count:
            raise Lost("the connection was closed", rank)
        return count

    def _sent(self, sock: Any, out: memoryview, rank: int) -> int:
        try:
            return sock.send(out)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as e:
            raise Lost(str(e), rank) from e

    def _tell(self, moved_at: float, told_at: float, rank: int) -> float:
        now = time.monotonic()
        if self._stall_shutdown and now - moved_at > self._stall_shutdown:
            raise Lost(
                f"no bytes to or from it for {now - moved_at:.0f} s, in the middle of a collective; "
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
                rank,
            )
        if self._stall_warning and now - max(moved_at, told_at) > self._stall_warning:
            print(
                f"hvd: no bytes to or from rank {rank} since {now - moved_at:.0f} s, in the middle of "
                "a collective",
                file=sys.stderr,
                flush=True,
            )
            return now
        return told_at


def _raw(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data if array.size else memoryview(b"")
