"""Transport over MPI with `mpi4py`, for clusters with a fast network that MPI supports.

No other module imports mpi4py. `join_world` initializes MPI at the first request. Each pair of ranks keeps
its socket, which reports the end of the other process, and transfers its data over MPI.
"""

import atexit
import contextlib
import itertools
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.frames import Lost
from ctl.collectives.settings import read_settings
from ctl.collectives.transports import mpi_launcher
from ctl.collectives.transports.link import CHUNK, Consume, Link
from ctl.collectives.transports.mpi_launcher import ManagerConnection
from ctl.errors import UsageError
from ctl.io import exit_hook

_WINDOW = 4  # pieces in flight, in each direction
_LAST_BYTES_SECS = 1.0  # time for data in flight after the other end has closed its socket
_POLL_SECS = 0.005
_REPORT_SECS, _LAST_SECS = 5.0, 10.0  # time of other processes to report their errors, and to end
_INSTALL = "Install it with `pip install 'tf-ctl[mpi]'`"
_world: "MpiWorld | None" = None


class MpiWorld:
    """The processes of one `mpirun`. The constructor blocks until all processes have called it.

    Args:
      mpi: The module `mpi4py.MPI`, initialized.
      start_timeout_secs: Time limit for the other processes.

    Attributes:
      mpi: The module.
      rank, size: Rank of this process in MPI's COMM_WORLD, and number of processes.
      token: Random text, equal in all processes.
      tags: Message tags that links of this process use.
      has_failed: True if a rank was lost, or if this process ends with an error.
    """

    def __init__(self, mpi: Any, start_timeout_secs: float):
        self.mpi = mpi
        _wait_for(mpi.COMM_WORLD.Ibarrier(), start_timeout_secs, "called MPI")
        self._communicator = mpi.COMM_WORLD.Dup()
        self._communicator.Set_errhandler(mpi.ERRORS_RETURN)
        self.rank, self.size = self._communicator.rank, self._communicator.size
        self.token = self._communicator.bcast(secrets.token_hex(32))
        self.tags = itertools.count(1)
        self.has_failed = False

    def allgather(self, text: str) -> list[str]:
        """Returns the texts of all processes by rank. All processes call it."""
        return self._communicator.allgather(text)

    def start_send(self, piece: np.ndarray, rank: int, tag: int) -> Any:
        """Starts to send bytes. Returns the request.

        The send completes when the other end receives, so that it needs no progress of MPI later.
        """
        return self._communicator.Issend([piece, self.mpi.BYTE], rank, tag)

    def start_receive(self, piece: np.ndarray, rank: int, tag: int) -> Any:
        """Starts to receive bytes. Returns the request."""
        return self._communicator.Irecv([piece, self.mpi.BYTE], rank, tag)

    def record_failure(self) -> None:
        """Sets `has_failed`."""
        self.has_failed = True

    def start_barrier(self) -> Any:
        """Starts a barrier of all processes. Returns the request."""
        return self._communicator.Ibarrier()


def join_world(environ: Mapping[str, str] = os.environ) -> MpiWorld:
    """Initializes MPI on the first call. Blocks until all processes of `mpirun` have called it.

    MPI is finalized at the end of the process unless the process ends with an error.

    Raises:
      UsageError: If mpi4py or an MPI library is missing, if the process was not started by `mpirun`, or if
        the library does not support calls from several threads.
      HorovodInternalError: If another process does not call it within HOROVOD_START_TIMEOUT.
    """
    global _world  # noqa: PLW0603  one per process, as COMM_WORLD is
    if _world is None:
        mpi = _load_mpi()
        if mpi.Is_finalized():
            raise UsageError("MPI was finalized by this program; expected mpi4py without MPI.Finalize().")
        is_owner = not mpi.Is_initialized()
        if is_owner:
            mpi_launcher.check_launcher(environ)
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
            atexit.register(finalize)
        _check_initialized(mpi, environ)
        _world = MpiWorld(mpi, read_settings(environ).start_timeout)
    return _world


def finalize(*, ends_last: bool = False) -> None:
    """Finalizes MPI. Waits until all processes call it. A no-op after the first call.

    After an error the process ends without MPI_Finalize, which would wait for the other processes. It waits
    for some seconds only, because mpirun kills the others at its end, before they have reported the error.

    Args:
      ends_last: True after an error that another process has caused. mpirun returns the exit code of the
        process that ends first.
    """
    world = _world
    mpi = sys.modules.get("mpi4py.MPI")
    if world is None or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    barrier = world.start_barrier()
    if world.has_failed or getattr(sys, "last_value", None) is not None:
        with contextlib.suppress(HorovodInternalError, mpi.Exception):
            _wait_for(barrier, _REPORT_SECS, "ended")
        time.sleep(_LAST_SECS if ends_last else 0.0)  # mpirun kills it when another process has failed
        return
    while not barrier.Test():  # MPI_Finalize would occupy a core until the last process calls it
        time.sleep(_POLL_SECS)
    connection = ManagerConnection(os.environ)
    mpi.Finalize()
    if exit_hook.skips_exit_functions():
        connection.end()


def record_failure() -> None:
    """Lets this process end without MPI_Finalize. A no-op without MPI."""
    if _world is not None:
        _world.record_failure()


def are_threads_supported() -> bool:
    """Returns True if this process has initialized MPI with MPI_THREAD_MULTIPLE."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and mpi.Query_thread() == mpi.THREAD_MULTIPLE


def _load_mpi() -> Any:
    """Imports mpi4py without initializing MPI."""
    try:
        import mpi4py
    except ImportError:
        raise UsageError(f"communication over MPI requires mpi4py. {_INSTALL}.") from None
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=False)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        first_line = (str(e).splitlines() or [""])[0]
        raise UsageError(
            f"mpi4py cannot load an MPI library ({first_line}). Install the library of the cluster, or "
            "`pip install mpich`, and rebuild mpi4py if its library differs from that of `mpirun`."
        ) from None
    return MPI


def _check_initialized(mpi: Any, environ: Mapping[str, str]) -> None:
    size, library = mpi.COMM_WORLD.size, mpi.Get_library_version().split("\n")[0].strip()
    launched = mpi_launcher.count_processes(environ, default=size)
    if launched != size:
        raise UsageError(
            f"mpirun has started {launched} processes, but MPI ({library}) connects {size}; expected equal "
            "numbers. mpirun and the library of mpi4py belong to different installations of MPI: use the "
            "mpirun of this library."
        )
    if size == 1:
        raise UsageError(
            f"communication over MPI with one process; expected at least 2: {mpi_launcher.USAGE}."
        )
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        raise UsageError(
            f"MPI ({library}) is initialized with thread level {mpi.Query_thread()}; expected "
            f"MPI_THREAD_MULTIPLE ({mpi.THREAD_MULTIPLE}), because ctl calls MPI in its own thread. Use a "
            "library with this level, and import mpi4py with its default settings."
        )


def _wait_for(request: Any, limit_secs: float, action: str) -> None:
    deadline_secs = time.monotonic() + limit_secs
    while not request.Test():
        if time.monotonic() > deadline_secs:
            raise HorovodInternalError(
                f"not all processes of mpirun have {action} within {limit_secs:g} s. Check that all of "
                "them run the same program, or increase HOROVOD_START_TIMEOUT."
            )
        time.sleep(_POLL_SECS)


class MpiLink:
    """A link over MPI.

    Args:
      sock: A connection to the other end, which becomes non-blocking. It transfers no data.
      rank: Rank of the other end, for errors.
      world: Processes of `mpirun`.
      world_rank: Rank of the other end in `world`.
      tag: Tag of all messages, equal on both ends and different for each link of the pair.
    """

    path, needs_polling = "mpi", True

    def __init__(self, sock: socket.socket, rank: int, world: MpiWorld, world_rank: int, tag: int):
        self.socket = sock
        self._rank, self._world, self._world_rank, self._tag = rank, world, world_rank, tag
        self._outgoing: deque[tuple[Any, np.ndarray]] = deque()  # requests and buffers, oldest first
        self._incoming: deque[tuple[Any, np.ndarray]] = deque()
        self._pieces: Iterator[np.ndarray] = iter(())
        self._buffers: list[np.ndarray] = []  # of pieces that are passed to a consumer
        self._into: np.ndarray | None = None
        self._consume: Consume | None = None
        self._size = self._received = self._requested = 0  # bytes of the incoming message
        self._ended_secs = 0.0  # time at which the other end has closed its socket
        sock.setblocking(False)

    @property
    def is_sent(self) -> bool:
        """True if the outgoing message has been sent."""
        return not self._outgoing

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
        """True if the socket should be polled for reading, to detect the end of the other process."""
        return not self._ended_secs and bool(self._outgoing or self._incoming)

    def send(self, views: Iterable[np.ndarray]) -> None:
        """Starts to send a message, the concatenation of arrays that must not change until `is_sent`."""
        self._pieces = _split_into_pieces(views)
        self._start_sends()

    def receive(self, size: int, into: np.ndarray | None, consume: Consume | None) -> None:
        """Starts to receive a message of `size` bytes into an array, or passes its chunks to `consume`."""
        self._received, self._requested, self._size, self._consume = 0, 0, size, consume
        self._into = None if into is None else into.view(np.uint8)
        self._start_receives()

    def read(self) -> None:
        """Detects the end of the other process. Messages that are in flight are still received."""
        try:
            data = self.socket.recv(1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._ended_secs = time.monotonic()

    def write(self) -> None:
        """Does not write: `poll` starts the sends."""

    def poll(self) -> bool:
        """Tests the oldest requests and starts the next ones. Raises Lost if the other process has ended.

        Returns:
          True if a request was complete.
        """
        has_progress = False
        try:
            while self._incoming and self._incoming[0][0].Test():
                _, piece = self._incoming.popleft()
                if self._consume is not None:
                    self._consume(self._received, piece)
                self._received += piece.size
                self._start_receives()
                has_progress = True
            while self._outgoing and self._outgoing[0][0].Test():
                self._outgoing.popleft()
                self._start_sends()
                has_progress = True
        except self._world.mpi.Exception as e:
            self._world.record_failure()
            raise Lost(f"MPI: {e}", self._rank) from e
        if has_progress and self._ended_secs:
            self._ended_secs = time.monotonic()
        elif self._ended_secs and time.monotonic() - self._ended_secs > _LAST_BYTES_SECS:
            self._world.record_failure()
            raise Lost("the connection was closed", self._rank)
        return has_progress

    def close(self) -> None:
        """Closes the connection. The buffers of incomplete requests are kept until the process ends."""
        if self._outgoing or self._incoming:
            self._world.record_failure()
            _incomplete.append((*self._outgoing, *self._incoming))
        self.socket.close()

    def _start_sends(self) -> None:
        while len(self._outgoing) < _WINDOW:
            piece = next(self._pieces, None)
            if piece is None:
                return
            self._outgoing.append((self._world.start_send(piece, self._world_rank, self._tag), piece))

    def _start_receives(self) -> None:
        while self._requested < self._size and len(self._incoming) < _WINDOW:
            end = min(self._requested + CHUNK, self._size)
            piece = self._select_buffer(end - self._requested)
            self._incoming.append((self._world.start_receive(piece, self._world_rank, self._tag), piece))
            self._requested = end

    def _select_buffer(self, count: int) -> np.ndarray:
        """Returns the memory for the next `count` bytes."""
        if self._consume is None:
            assert self._into is not None
            return self._into[self._requested : self._requested + count]
        index = self._requested // CHUNK % _WINDOW
        if index == len(self._buffers):
            self._buffers.append(np.empty(CHUNK, np.uint8))
        return self._buffers[index][:count]


_incomplete: list[Any] = []  # requests and buffers that MPI may still access


class MpiTransport:
    """Factory of links over MPI. The lower rank of a pair chooses the tag of their messages. A `Transport`.

    Raises:
      UsageError: Like `join_world`.
      HorovodInternalError: Like `join_world`.
    """

    path = "mpi"

    def __init__(self) -> None:
        self._world = join_world()
        self._tags: dict[int, int] = {}

    def create_offer(self, peer: int) -> dict[str, Any]:
        """Returns a tag and the identity of this process in MPI."""
        self._tags[peer] = next(self._world.tags)
        return {**self._identify(), "tag": self._tags[peer]}

    def accept_offer(
        self, connection: socket.socket, peer: int, offer: dict[str, Any]
    ) -> tuple[Link, dict[str, Any]]:
        """Returns the link with the offered tag, and the identity of this process in MPI."""
        return self._create_link(connection, peer, offer, offer["tag"]), self._identify()

    def complete_offer(self, connection: socket.socket, peer: int, answer: dict[str, Any]) -> Link:
        """Returns the link with the tag of the offer."""
        return self._create_link(connection, peer, answer, self._tags.pop(peer))

    def release_offers(self) -> None:
        """Forgets the tags of offers without an answer."""
        self._tags.clear()

    def record_failure(self) -> None:
        """Lets the process end without MPI_Finalize."""
        self._world.record_failure()

    def _identify(self) -> dict[str, Any]:
        return {"world_rank": self._world.rank, "token": self._world.token}

    def _create_link(
        self, connection: socket.socket, peer: int, identity: Mapping[str, Any], tag: int
    ) -> MpiLink:
        if identity["token"] != self._world.token:
            raise UsageError(
                f"rank {peer} belongs to another mpirun; expected all ranks of the job in one. Leave "
                "TF_CONFIG and CTL_WORKERS unset, so that MPI lists the ranks."
            )
        return MpiLink(connection, peer, self._world, identity["world_rank"], tag)


def _split_into_pieces(views: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the concatenation in pieces of CHUNK bytes. Copies only pieces of several arrays."""
    remaining = deque(view.view(np.uint8) for view in views if view.size)
    while remaining:
        parts, size = [], 0
        while remaining and size < CHUNK:
            view = remaining.popleft()
            part = view[: CHUNK - size]
            if part.size < view.size:
                remaining.appendleft(view[part.size :])
            parts.append(part)
            size += part.size
        yield parts[0] if len(parts) == 1 else np.concatenate(parts)
