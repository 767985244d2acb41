"""Bytes between two ranks: through one or several sockets, or through memory that both processes see.

A link moves one message out and one message in at a time; the two ends agree beforehand on the sizes.
Its `streams`, each with a socket, are watched by the caller (`Mesh`).
"""

import contextlib
import mmap
import os
import secrets
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ctl.collectives import memory
from ctl.collectives.frames import Lost

CHUNK = 1 << 19  # bytes that are handed on at a time; a part of a processor's cache
Consume = Callable[[int, np.ndarray], None]  # (offset in the message, bytes that came)

_MOST_VIEWS = 64  # of one system call
_LEAST_PART = 1 << 18  # bytes of a message for a socket beside others
_SLOTS = 4  # of shared memory, in each direction
_MOST_UNREPORTED = 2  # emptied slots that are reported together: each message wakes the other end
_FILLED, _EMPTIED = b"F", b"E"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TOKEN_BYTES = 32


class SocketLink:
    """A link through a connected socket.

    Args:
      sock: it becomes non-blocking.
      rank: of the other end, for errors.
    """

    def __init__(self, sock: socket.socket, rank: int):
        self.socket = sock
        self._rank = rank
        self._views: deque[memoryview] = deque()
        self._consume: Consume | None = None
        self._target = memoryview(b"")
        self._received = self._size = self._filled = 0
        self._scratch = np.empty(0, np.uint8)
        sock.setblocking(False)

    @property
    def streams(self) -> tuple["SocketLink"]:
        """Itself: it has one socket."""
        return (self,)

    @property
    def is_sent(self) -> bool:
        """The message out has left."""
        return not self._views

    @property
    def is_received(self) -> bool:
        """The message in is here."""
        return self._received == self._size

    @property
    def wants_write(self) -> bool:
        """Whether the socket is to be watched for room."""
        return bool(self._views)

    @property
    def wants_read(self) -> bool:
        """Whether the socket is to be watched for bytes."""
        return self._received < self._size

    def send(self, views: Iterable[np.ndarray]) -> None:
        """Begins a message out, of arrays one after the other, that stay as they are until it has left."""
        self._views = deque(_raw(view) for view in views if view.size)
        if self._views:
            self.write()

    def receive(self, size: int, into: np.ndarray | None, consume: Consume | None) -> None:
        """Begins a message in of `size` bytes: into an array, or handed to `consume` chunk by chunk."""
        self._received, self._filled, self._size, self._consume = 0, 0, size, consume
        if consume is not None and not self._scratch.size and size:
            self._scratch = np.empty(CHUNK, np.uint8)
        self._target = memoryview(b"") if into is None else _raw(into)

    def read(self) -> None:
        """The socket has bytes; raises Lost if the other end is gone."""
        while self._received < self._size:
            if self._consume is None:
                place = self._target[self._received :]
            else:
                most = min(CHUNK, self._size - self._received + self._filled)
                place = self._scratch.data[self._filled : most]
            count = self._came(place)
            if not count:
                return
            if self._consume is None:
                self._received += count
                continue
            self._filled += count
            self._received += count
            if self._filled == CHUNK or self._received == self._size:
                self._consume(self._received - self._filled, self._scratch[: self._filled])
                self._filled = 0

    def write(self) -> None:
        """The socket has room; raises Lost if the other end is gone."""
        while self._views:
            some = [self._views[i] for i in range(min(len(self._views), _MOST_VIEWS))]
            try:
                count = self.socket.sendmsg(some)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as e:
                raise Lost(str(e), self._rank) from e
            while count and count >= len(self._views[0]):
                count -= len(self._views.popleft())
            if count:
                self._views[0] = self._views[0][count:]

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()

    def _came(self, place: Any) -> int:
        try:
            count = self.socket.recv_into(place)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as e:
            raise Lost(str(e), self._rank) from e
        if not count:
            raise Lost("the connection was closed", self._rank)
        return count


class MemoryLink:
    """A link through shared memory; the socket only says which slots are full and which are free.

    Args:
      sock: connected to the other end; it becomes non-blocking.
      rank: of the other end.
      memory: `memory_size()` bytes, shared with it.
      is_first: whether the first half of the memory is what this end writes.
    """

    def __init__(self, sock: socket.socket, rank: int, memory: mmap.mmap, *, is_first: bool):
        self.socket = sock
        self._rank = rank
        halves = np.frombuffer(memory, np.uint8).reshape(2, _SLOTS, CHUNK)
        self._outgoing, self._incoming = (halves[0], halves[1]) if is_first else (halves[1], halves[0])
        self._free, self._full = _SLOTS, 0
        self._unreported = 0  # emptied slots that the other end does not know of yet
        self._put = self._taken = 0  # slots so far, modulo _SLOTS
        self._views: deque[np.ndarray] = deque()
        self._left = 0  # bytes of the message out that are not in a slot yet
        self._received = self._size = 0
        self._into: np.ndarray | None = None
        self._consume: Consume | None = None
        sock.setblocking(False)

    @property
    def streams(self) -> tuple["MemoryLink"]:
        """Itself: it has one socket."""
        return (self,)

    @property
    def is_sent(self) -> bool:
        """The message out has left."""
        return not self._left

    @property
    def is_received(self) -> bool:
        """The message in is here."""
        return self._received == self._size

    @property
    def wants_write(self) -> bool:
        """Whether the socket is to be watched for room."""
        return False

    @property
    def wants_read(self) -> bool:
        """Whether the socket is to be watched for bytes."""
        return bool(self._left) or self._received < self._size

    def send(self, views: Iterable[np.ndarray]) -> None:
        """Begins a message out, of arrays one after the other, that stay as they are until it has left."""
        self._views = deque(view.view(np.uint8) for view in views if view.size)
        self._left = sum(view.size for view in self._views)
        self.write()

    def receive(self, size: int, into: np.ndarray | None, consume: Consume | None) -> None:
        """Begins a message in of `size` bytes: into an array, or handed to `consume` chunk by chunk."""
        self._received, self._size, self._consume = 0, size, consume
        self._into = None if into is None else into.view(np.uint8)
        self._take()

    def read(self) -> None:
        """The socket has bytes; raises Lost if the other end is gone."""
        try:
            words = self.socket.recv(4 * _SLOTS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            raise Lost(str(e), self._rank) from e
        if not words:
            raise Lost("the connection was closed", self._rank)
        self._full += words.count(_FILLED)
        self._free += words.count(_EMPTIED)
        self._take()
        self.write()

    def write(self) -> None:
        """Fills the free slots with what is left of the message out."""
        while self._left and self._free:
            slot, size = self._outgoing[self._put], min(CHUNK, self._left)
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
            self._left -= size
            self._free -= 1
            self._put = (self._put + 1) % _SLOTS
            self._tell(_EMPTIED * self._unreported + _FILLED)
            self._unreported = 0

    def close(self) -> None:
        """Ends the connection; the memory goes with its last user."""
        self.socket.close()

    def _take(self) -> None:
        while self._full and self._received < self._size:
            count = min(CHUNK, self._size - self._received)
            chunk = self._incoming[self._taken][:count]
            if self._consume is not None:
                self._consume(self._received, chunk)
            elif self._into is not None:
                self._into[self._received : self._received + count] = chunk
            self._received += count
            self._full -= 1
            self._taken = (self._taken + 1) % _SLOTS
            self._unreported += 1
            if self._unreported == _MOST_UNREPORTED:
                with contextlib.suppress(Lost):  # the other end may have left: it has sent all
                    self._tell(_EMPTIED * self._unreported)
                self._unreported = 0

    def _tell(self, words: bytes) -> None:
        while words:
            try:
                words = words[self.socket.send(words) :]
            except (BlockingIOError, InterruptedError):  # so many bytes never wait there
                time.sleep(0.001)
            except OSError as e:
                raise Lost(str(e), self._rank) from e


class StripedLink:
    """A link through several sockets, each for a part of every long message.

    One connection alone is held back by its window, by each lost packet, and where a network gives
    each flow only a share of its rate.

    Args:
      socks: in the same order on both ends.
      rank: of the other end.
    """

    def __init__(self, socks: Sequence[socket.socket], rank: int):
        self.streams = tuple(SocketLink(sock, rank) for sock in socks)

    @property
    def is_sent(self) -> bool:
        """The message out has left."""
        return all(stream.is_sent for stream in self.streams)

    @property
    def is_received(self) -> bool:
        """The message in is here."""
        return all(stream.is_received for stream in self.streams)

    def send(self, views: Iterable[np.ndarray]) -> None:
        """Begins a message out, of arrays one after the other, that stay as they are until it has left."""
        left = deque(view.view(np.uint8) for view in views if view.size)
        for stream, low, high in self._parts(sum(view.size for view in left)):
            part, missing = [], high - low
            while missing:
                view = left.popleft()
                if view.size > missing:
                    left.appendleft(view[missing:])
                part.append(view[:missing])
                missing -= part[-1].size
            stream.send(part)

    def receive(self, size: int, into: np.ndarray | None, consume: Consume | None) -> None:
        """Begins a message in of `size` bytes: into an array, or handed to `consume` in any order."""
        raw = None if into is None else into.view(np.uint8)
        for stream, low, high in self._parts(size):
            place = None if raw is None else raw[low:high]
            stream.receive(high - low, place, consume and _from(low, consume))

    def close(self) -> None:
        """Ends the connections."""
        for stream in self.streams:
            stream.close()

    def _parts(self, size: int) -> list[tuple[SocketLink, int, int]]:
        """(stream, first byte, end): parts begin at multiples of `memory.ALIGNMENT`."""
        used = max(1, min(len(self.streams), size // _LEAST_PART))
        bounds = [size * i // used // memory.ALIGNMENT * memory.ALIGNMENT for i in range(used)]
        bounds += [size] * (len(self.streams) + 1 - used)
        return list(zip(self.streams, bounds, bounds[1:], strict=False))


Stream = SocketLink | MemoryLink
Link = Stream | StripedLink


def _from(start: int, consume: Consume) -> Consume:
    return lambda offset, data: consume(start + offset, data)


def memory_size() -> int:
    """Bytes that two ranks share."""
    return 2 * _SLOTS * CHUNK


class SharedMemory:
    """Memory that another process of this user on this machine can open; `offer` says how."""

    def __init__(self) -> None:
        self._file = os.memfd_create("ctl-collectives") if hasattr(os, "memfd_create") else -1
        self.memory: mmap.mmap | None = None
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        if self._file >= 0:
            os.ftruncate(self._file, memory_size())
            self.memory = mmap.mmap(self._file, memory_size())
            self.memory[:_TOKEN_BYTES] = self._token

    def offer(self) -> dict[str, Any]:
        """For `opened_memory` in the other process; {} where there is none."""
        if self.memory is None:
            return {}
        return {**_place(), "pid": os.getpid(), "file": self._file, "token": self._token.hex()}

    def release(self) -> None:
        """The other process has opened it, or will not."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def opened_memory(offer: dict[str, Any]) -> mmap.mmap | None:
    """The memory that another process offers; None where this one cannot see it."""
    if not offer or {name: offer.get(name) for name in _place()} != _place():
        return None
    try:
        name = f"/proc/{int(offer['pid'])}/fd/{int(offer['file'])}"
        file = os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size != memory_size():
            return None
        memory = mmap.mmap(file, memory_size())
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return memory if memory[:_TOKEN_BYTES] == bytes.fromhex(offer["token"]) else None


def _place() -> dict[str, str]:
    """What processes have alike that see each other's numbers."""
    found = {"boot": "", "processes": ""}
    with contextlib.suppress(OSError):
        found = {"boot": _BOOT.read_text().strip(), "processes": os.readlink("/proc/self/ns/pid")}
    return found


def _raw(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data if array.size else memoryview(b"")
