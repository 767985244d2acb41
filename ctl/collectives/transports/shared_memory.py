"""Transport through the shared memory of two processes of one machine. Other pairs of ranks use sockets."""

import contextlib
import mmap
import os
import secrets
import socket
import stat
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from ctl.collectives.frames import Lost
from ctl.collectives.transports.link import CHUNK, Consume, Link
from ctl.collectives.transports.sockets import SocketLink

_SLOTS = 4  # number of slots of shared memory, in each direction
_MAX_UNREPORTED = 2  # emptied slots per notification, because each one wakes the other process
_FILLED, _EMPTIED = b"F", b"E"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 32


class MemoryLink:
    """A link over shared memory. The socket transfers only notifications of filled and emptied slots.

    Args:
      sock: A connection to the other end, which becomes non-blocking.
      rank: Rank of the other end, for errors.
      memory: `memory_size()` bytes that both ends share.
      is_first: True if this end writes the first half of the memory.
    """

    path, needs_polling = "memory", False

    def __init__(self, sock: socket.socket, rank: int, memory: mmap.mmap, *, is_first: bool):
        self.socket = sock
        self._rank = rank
        halves = np.frombuffer(memory, np.uint8).reshape(2, _SLOTS, CHUNK)
        self._outgoing, self._incoming = (halves[0], halves[1]) if is_first else (halves[1], halves[0])
        self._free, self._full = _SLOTS, 0
        self._unreported = 0  # emptied slots without a notification to the other end
        self._next_outgoing = self._next_incoming = 0  # slot numbers
        self._views: deque[np.ndarray] = deque()
        self._unsent = 0  # bytes of the outgoing message that are not in a slot yet
        self._received = self._size = 0
        self._into: np.ndarray | None = None
        self._consume: Consume | None = None
        sock.setblocking(False)

    @property
    def is_sent(self) -> bool:
        """True if the outgoing message has been sent."""
        return not self._unsent

    @property
    def is_received(self) -> bool:
        """True if the incoming message is complete."""
        return self._received == self._size

    @property
    def needs_write(self) -> bool:
        """True if the socket should be polled for writing."""
        return False

    @property
    def needs_read(self) -> bool:
        """True if the socket should be polled for reading."""
        return bool(self._unsent) or self._received < self._size

    def send(self, views: Iterable[np.ndarray]) -> None:
        """Starts to send a message, the concatenation of arrays that must not change until `is_sent`."""
        self._views = deque(view.view(np.uint8) for view in views if view.size)
        self._unsent = sum(view.size for view in self._views)
        self.write()

    def receive(self, size: int, into: np.ndarray | None, consume: Consume | None) -> None:
        """Starts to receive a message of `size` bytes into an array, or passes its chunks to `consume`."""
        self._received, self._size, self._consume = 0, size, consume
        self._into = None if into is None else into.view(np.uint8)
        self._read_full_slots()

    def read(self) -> None:
        """Reads all available bytes. Raises Lost if the connection has ended."""
        try:
            notifications = self.socket.recv(4 * _SLOTS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            raise Lost(str(e), self._rank) from e
        if not notifications:
            raise Lost("the connection was closed", self._rank)
        self._full += notifications.count(_FILLED)
        self._free += notifications.count(_EMPTIED)
        self._read_full_slots()
        self.write()

    def write(self) -> None:
        """Copies bytes of the outgoing message into free slots and notifies the other end."""
        while self._unsent and self._free:
            slot, size = self._outgoing[self._next_outgoing], min(CHUNK, self._unsent)
            filled = 0
            while filled < size:
                view = self._views[0]
                count = min(view.size, size - filled)
                slot[filled : filled + count] = view[:count]
                filled += count
                if count == view.size:
                    self._views.popleft()
                else:
                    self._views[0] = view[count:]
            self._unsent -= size
            self._free -= 1
            self._next_outgoing = (self._next_outgoing + 1) % _SLOTS
            self._notify(_EMPTIED * self._unreported + _FILLED)
            self._unreported = 0

    def poll(self) -> bool:
        """Returns False: events of the socket announce all bytes."""
        return False

    def close(self) -> None:
        """Closes the connection. The last reference releases the memory."""
        self.socket.close()

    def _read_full_slots(self) -> None:
        while self._full and self._received < self._size:
            count = min(CHUNK, self._size - self._received)
            chunk = self._incoming[self._next_incoming][:count]
            if self._consume is not None:
                self._consume(self._received, chunk)
            elif self._into is not None:
                self._into[self._received : self._received + count] = chunk
            self._received += count
            self._full -= 1
            self._next_incoming = (self._next_incoming + 1) % _SLOTS
            self._unreported += 1
            if self._unreported == _MAX_UNREPORTED:
                with contextlib.suppress(Lost):  # the other end may have closed after its last message
                    self._notify(_EMPTIED * self._unreported)
                self._unreported = 0

    def _notify(self, notifications: bytes) -> None:
        while notifications:
            try:
                notifications = notifications[self.socket.send(notifications) :]
            except (BlockingIOError, InterruptedError):  # rare: a few bytes fit into the socket's buffer
                time.sleep(0.001)
            except OSError as e:
                raise Lost(str(e), self._rank) from e


def memory_size() -> int:
    """Returns the size of the memory that two ranks share (bytes)."""
    return 2 * _SLOTS * CHUNK


class SharedMemory:
    """A memory file that another process of this user on this machine can open."""

    def __init__(self) -> None:
        self._file = os.memfd_create("ctl-collectives") if hasattr(os, "memfd_create") else -1
        self.memory: mmap.mmap | None = None
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        if self._file >= 0:
            os.ftruncate(self._file, memory_size())
            self.memory = mmap.mmap(self._file, memory_size())
            self.memory[:_TOKEN_BYTES] = self._token

    def offer(self) -> dict[str, Any]:
        """Returns the argument for `open_memory` in the other process, or {} without memory files."""
        if self.memory is None:
            return {}
        return {
            **_read_machine_identifiers(),
            "pid": os.getpid(),
            "file": self._file,
            "token": self._token.hex(),
        }

    def release(self) -> None:
        """Closes the file. Call this after the other process has opened or rejected it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_memory(offer: dict[str, Any]) -> mmap.mmap | None:
    """Maps the memory that another process offers. Returns None if this process cannot open it."""
    if (
        not offer
        or {name: offer.get(name) for name in _read_machine_identifiers()} != _read_machine_identifiers()
    ):
        return None
    try:
        name = f"/proc/{int(offer['pid'])}/fd/{int(offer['file'])}"
        file = os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != memory_size():
            return None
        memory = mmap.mmap(file, memory_size())
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return memory if memory[:_TOKEN_BYTES] == bytes.fromhex(offer["token"]) else None


def _read_machine_identifiers() -> dict[str, str]:
    """Returns identifiers that are equal in processes that share /proc."""
    identifiers = {"boot": "", "processes": ""}
    with contextlib.suppress(OSError):
        identifiers = {"boot": _BOOT.read_text().strip(), "processes": os.readlink("/proc/self/ns/pid")}
    return identifiers


class MemoryTransport:
    """Factory of links through shared memory. The lower rank of a pair offers a file. A `Transport`."""

    path = "memory"

    def __init__(self) -> None:
        self._offered: dict[int, SharedMemory] = {}

    def create_offer(self, peer: int) -> dict[str, Any]:
        """Creates the memory for a pair of ranks and returns the argument for `open_memory`."""
        self._offered[peer] = SharedMemory()
        return self._offered[peer].offer()

    def accept_offer(
        self, connection: socket.socket, peer: int, offer: dict[str, Any]
    ) -> tuple[Link, dict[str, Any]]:
        """Opens the memory. Returns the link and the answer, whether the memory was opened."""
        memory = open_memory(offer)
        return _create_link(connection, peer, memory, is_first=False), {"sees": memory is not None}

    def complete_offer(self, connection: socket.socket, peer: int, answer: dict[str, Any]) -> Link:
        """Returns a link through the memory if the other rank has opened it, otherwise over the socket."""
        memory = self._offered[peer].memory if answer.get("sees") else None
        return _create_link(connection, peer, memory, is_first=True)

    def release_offers(self) -> None:
        """Closes the files of the offers."""
        for shared in self._offered.values():
            shared.release()
        self._offered.clear()

    def record_failure(self) -> None:
        """Does not record the failure: the end of the process does not wait for other ranks."""


def _create_link(sock: socket.socket, peer: int, memory: mmap.mmap | None, *, is_first: bool) -> Link:
    return SocketLink(sock, peer) if memory is None else MemoryLink(sock, peer, memory, is_first=is_first)
