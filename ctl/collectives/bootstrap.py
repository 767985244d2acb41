"""Rendezvous of the ranks: each rank listens, and connects to its parent and to its lower partners.

The parent in the tree of `control_tree` is rank 0 for up to 33 ranks.

Both ends authenticate with the job's secret (`ctl.io.authenticated_channel`). A rank refuses peers with
another protocol version, number of ranks, generation or assignment of ranks to machines. No port is open
after the rendezvous.
"""

import contextlib
import errno
import queue
import random
import select
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from ctl.collectives.control_tree import ControlTree
from ctl.collectives.descriptors import check_descriptors
from ctl.collectives.errors import HorovodInternalError, PortInUseError
from ctl.collectives.partners import partners_of
from ctl.collectives.ranks import Ranks
from ctl.collectives.settings import Settings
from ctl.errors import UsageError
from ctl.io.authenticated_channel import ChannelRefusedError, Endpoint, Listener
from ctl.io.rendezvous import (
    Caller,
    Deadline,
    listener_sentence,
    listening_socket,
    refusal_sentence,
    split_address,
)

_PROTOCOL = 9
_LOG_INTERVAL_SECS = 30.0
_POLL_INTERVAL_SECS = 0.1
_MIN_RETRY_SECS = 0.05
_CALL_INTERVAL_SECS = 0.0005  # between two calls of a rank by any of its children
_MIN_QUEUED_CALLS = 128  # calls that the queue of a listening socket holds also with older kernels


@dataclass
class Connections:
    """Connections of one rank after the rendezvous.

    Attributes:
      control: Connection to the parent, or to the coordinator on this rank.
      peers: Rank -> connection to it.
      accepted: Rank -> its control connection, for the children. On rank 0 also for this rank.
    """

    control: socket.socket
    peers: dict[int, socket.socket]
    accepted: dict[int, socket.socket]

    def close(self) -> None:
        """Closes all connections."""
        for sock in (self.control, *self.peers.values(), *self.accepted.values()):
            sock.close()


def list_calls(rank: int, peers: Set[int], parent: int | None = None) -> list[tuple[str, int]]:
    """Returns the connections that a rank requests, in order: role "control" or "peer", and called rank.

    Args:
      rank: The rank.
      peers: Ranks to which it connects. The higher ones call it.
      parent: Rank to which it sends its requests. None: it is connected already, or this is rank 0.
    """
    calls = [("peer", peer) for peer in sorted(peers) if peer < rank]
    return calls if parent is None else [("control", parent), *calls]


def max_pause_secs(role: str, count: int) -> float:
    """Returns the maximum pause of a caller (seconds).

    All children call their parent, at most 2,000 times per second together while it does not listen.

    Args:
      role: Role of the connection, as in `list_calls`.
      count: Number of children of the called rank.
    """
    return max(_MIN_RETRY_SECS, count * _CALL_INTERVAL_SECS) if role == "control" else _MIN_RETRY_SECS


def max_delay_secs(count: int) -> float:
    """Returns the maximum delay of the first call of the parent (seconds).

    Many ranks that start at the same time must not fill the queue of the listening socket, because the
    kernel then repeats their calls after a second or more.

    Args:
      count: Number of its children.
    """
    return max(0, count - _MIN_QUEUED_CALLS) * _CALL_INTERVAL_SECS


def connect_ranks(
    ranks: Ranks, settings: Settings, lost: Callable[[], str] = str, server: socket.socket | None = None
) -> Connections:
    """Connects this rank to its parent and to its partners. Blocks until it has all connections.

    Args:
      ranks: Ranks of this process.
      settings: Timeouts and the secret of the job.
      lost: Polled. Returns a message about a rank that failed to start, or an empty string.
      server: A socket that listens at this rank's address. None creates one.

    Returns:
      The connections of this rank.

    Raises:
      UsageError: If this rank cannot listen at its address, cannot open enough files or is refused.
      PortInUseError: If only the port is in use.
      HorovodInternalError: If some ranks do not connect within `settings.start_timeout` seconds.
    """
    peers = partners_of(ranks.size)[ranks.rank]
    rendezvous = _Rendezvous(ranks, settings, lost, server, peers)
    rendezvous.run()
    assert rendezvous.control is not None
    return Connections(rendezvous.control, dict(sorted(rendezvous.peers.items())), rendezvous.accepted)


def connect_peers(
    ranks: Ranks, settings: Settings, peers: Set[int], lost: Callable[[], str], server: socket.socket
) -> dict[int, socket.socket]:
    """Connects this rank to further ranks, which call this function for this rank. Blocks.

    Args:
      ranks: Ranks of this process, with addresses at which all `peers` listen.
      settings: Timeouts and the secret of the job.
      peers: The other ranks.
      lost: Like that of `connect_ranks`.
      server: A socket that listens at this rank's address.

    Returns:
      Rank -> connection.

    Raises:
      UsageError: If this rank cannot open enough files or is refused.
      HorovodInternalError: If some ranks do not connect within `settings.start_timeout` seconds.
    """
    rendezvous = _Rendezvous(ranks, settings, lost, server, peers, is_late=True)
    rendezvous.run()
    return rendezvous.peers


class _Rendezvous:
    """Connections of this rank to the ranks `peers` and, unless `is_late`, in the tree of requests."""

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        lost: Callable[[], str],
        server: socket.socket | None,
        peers: Set[int],
        *,
        is_late: bool = False,
    ):
        self._ranks = ranks
        self._expected_peers, self._is_late = peers, is_late
        self._tree = ControlTree(ranks.size, settings.fanout)
        self._lost = lost
        self._settings = settings
        self._deadline = Deadline(settings.start_timeout, _LOG_INTERVAL_SECS, has_backoff=False)
        self.peers: dict[int, socket.socket] = {}
        self.accepted: dict[int, socket.socket] = {}
        self.control: socket.socket | None = None
        check_descriptors(len(peers), 0 if is_late else self._tree.num_connections(ranks.rank))
        self._call_error = ""  # error of the latest connection attempt
        self._listener = Listener(
            server or self._create_listening_socket(), self._endpoint(ranks.rank), self._check_claim
        )
        self._arrivals: queue.SimpleQueue[tuple[socket.socket, dict]] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="hvd-rendezvous", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Creates all connections. Closes them after an error, and the listening socket in any case."""
        try:
            self._connect_all()
        except BaseException:
            self._close_connections()
            raise
        finally:
            self._close()

    def _connect_all(self) -> None:
        """Connects to the lower ranks and accepts the connections of the higher ones."""
        rank = self._ranks.rank
        parent = None if self._is_late or rank == 0 else self._tree.parent(rank)
        calls = list_calls(rank, self._expected_peers, parent)
        if rank == 0 and not self._is_late:
            self.accepted[0], self.control = socket.socketpair()
        elif parent is not None:
            num_callers = len(self._tree.children(parent))
            time.sleep(random.SystemRandom().uniform(0, max_delay_secs(num_callers)))
        caller: Caller | None = None
        while not self._is_complete():
            if calls:
                role, called_rank = calls[0]
                caller = caller or self._create_caller(role, called_rank)
                sock = self._connect(caller, called_rank)
                if sock is not None:
                    calls.pop(0)
                    caller = None
                    if role == "control":
                        self.control = sock
                    else:
                        self.peers[called_rank] = sock
            self._accept_arrivals(0.0 if calls or self._is_complete() else 0.2)
            self._check_deadline({called_rank for _, called_rank in calls})

    def _close(self) -> None:
        """Closes the listening socket and ends the thread. No port of this rank is open afterwards."""
        self._is_over.set()
        self._wakeup_sender.close()
        self._thread.join()
        self._wakeup_receiver.close()
        self._listener.close()
        while not self._arrivals.empty():
            self._arrivals.get()[0].close()

    def _close_connections(self) -> None:
        """Closes the connections after a failed rendezvous."""
        for sock in (*self.peers.values(), *self.accepted.values(), self.control):
            if sock is not None:
                sock.close()

    def _is_complete(self) -> bool:
        has_peers = len(self.peers) == len(self._expected_peers)
        return has_peers and (self._is_late or (self.control is not None and not self._missing_callers()))

    def _missing_callers(self) -> set[int]:
        """Returns the children that have not connected yet."""
        children = () if self._is_late else self._tree.children(self._ranks.rank)
        return set(children) - self.accepted.keys()

    def _endpoint(self, rank: int) -> Endpoint:
        return Endpoint(self._settings.secret, "ranks", f"rank {rank}")

    def _create_listening_socket(self) -> socket.socket:
        ranks = self._ranks
        try:
            return listening_socket(*split_address(ranks.addresses[ranks.rank]))
        except OSError as e:
            is_taken = e.errno == errno.EADDRINUSE
            raise (PortInUseError if is_taken else UsageError)(
                f"rank {ranks.rank} cannot listen at {ranks.addresses[ranks.rank]} ({e}); expected an "
                "address of this machine and a free port. Is another process of the job still running?"
            ) from None

    def _listen(self) -> None:
        """Accepts connections in a separate thread while `run` connects to the lower ranks."""
        poller = select.poll()
        poller.register(self._listener.fileno(), select.POLLIN)
        poller.register(self._wakeup_receiver.fileno(), select.POLLIN)
        while not self._is_over.is_set():
            poller.poll(1000 * _POLL_INTERVAL_SECS)
            for arrival in self._listener.accept_callers():
                self._arrivals.put(arrival)

    def _create_caller(self, role: str, rank: int) -> Caller:
        claim = {"role": role, "rank": self._ranks.rank, **self._common_claim()}
        address = split_address(self._ranks.addresses[rank])
        pause_secs = max_pause_secs(role, len(self._tree.children(rank)))
        return Caller(address, self._endpoint(rank), claim, pause_secs=pause_secs)

    def _connect(self, caller: Caller, rank: int) -> socket.socket | None:
        try:
            sock = caller.call(self._deadline.remaining_secs)
        except ChannelRefusedError as e:
            raise UsageError(f"rank {rank} refused rank {self._ranks.rank}: {e}") from None
        if sock is None:
            self._call_error = f"rank {rank}: {caller.failure}"
            caller.pause()
        return sock

    def _common_claim(self) -> dict:
        ranks = self._ranks
        return {
            "protocol": _PROTOCOL,
            "size": ranks.size,
            "generation": ranks.generation,
            "fanout": self._settings.fanout,
            "machines": zlib.crc32(repr(ranks.machine_by_rank).encode()),  # the size of a claim is limited
        }

    def _accept_arrivals(self, wait_secs: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sock, claim = self._arrivals.get(timeout=wait_secs or None, block=wait_secs > 0)
                wait_secs = 0.0
                accepted = self.accepted if claim["role"] == "control" else self.peers
                previous = accepted.get(claim["rank"])
                if previous is not None:  # the rank retried because it did not receive the verdict
                    previous.close()
                accepted[claim["rank"]] = sock

    def _check_claim(self, claim: dict[str, Any]) -> ChannelRefusedError | None:
        for name, expected in self._common_claim().items():
            if claim.get(name) != expected:
                text = (
                    "its list of addresses assigns the ranks to other machines; expected the same host "
                    "names in the lists of all ranks (TF_CONFIG)."
                    if name == "machines"
                    else f"its {name} is {claim.get(name)}; expected {expected}. Start all ranks with the "
                    "same command and the same version of ctl."
                )
                return ChannelRefusedError(
                    text, can_retry=claim.get("generation") != self._ranks.generation
                )
        role, rank, ranks = claim.get("role"), claim.get("rank"), self._ranks
        if role == "control" and type(rank) is int and 0 < rank < ranks.size:
            parent = self._tree.parent(rank)
            if ranks.rank != parent:
                text = f"{ranks.addresses[ranks.rank]} is rank {ranks.rank}, not rank {parent}."
                return ChannelRefusedError(text)
        if type(rank) is not int or not ranks.rank < rank < ranks.size:
            last = ranks.size - 1
            return ChannelRefusedError(
                f"it identified itself as rank {rank}; expected a rank from {ranks.rank + 1} to {last}."
            )
        if role != "control" and (role != "peer" or rank not in self._expected_peers):
            higher_peers = sorted(peer for peer in self._expected_peers if peer > ranks.rank)
            return ChannelRefusedError(
                f"rank {rank} requested a connection as {role!r}; expected 'peer' of a rank in "
                f"{higher_peers}."
            )
        return None

    def _check_deadline(self, called: set[int]) -> None:
        """Raises an error after the deadline or if a rank failed to start. Logs the missing ranks.

        Args:
          called: Ranks to which this rank has not connected yet.
        """
        failure, deadline = self._lost(), self._deadline
        if failure:
            raise HorovodInternalError(failure)
        if not (deadline.is_over or deadline.is_reminder_due()):
            return
        ranks = self._ranks
        missing = called | self._missing_callers() | (self._expected_peers - self.peers.keys())
        names = ", ".join(f"{rank} ({ranks.addresses[rank]})" for rank in sorted(missing)[:8])
        text = f"rank {ranks.rank} of {ranks.size} waits for rank {names}"
        if deadline.is_over:
            call = f" Last connection error: {self._call_error}." if called and self._call_error else ""
            raise HorovodInternalError(
                f"{text}: not connected after {deadline.timeout_secs:g} s. Check that these processes are "
                "running and that this machine can reach their ports, or increase HOROVOD_START_TIMEOUT."
                f"{call}{listener_sentence(self._listener)}{refusal_sentence(self._listener)}"
            )
        print(f"hvd: {text}", file=sys.stderr, flush=True)
