"""Rendezvous of the ranks: each rank listens, and connects to all lower ranks.

Both ends authenticate with the job's secret (`ctl.io.authenticated_channel`). An error names ranks of
another version, another number of ranks or an earlier group. After the rendezvous no port is open.
"""

import contextlib
import errno
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ctl.collectives.descriptors import check_descriptors
from ctl.collectives.errors import HorovodInternalError, PortInUseError
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

_PROTOCOL = 6
_TELL_EVERY_SECS = 30.0
_LOOK_SECS = 0.1
_RETRY_SECS = 0.05


@dataclass
class Connections:
    """Connections of one rank after the rendezvous.

    Attributes:
      control: Connection to the coordinator on rank 0.
      peers: Rank -> connection to it.
      accepted: On rank 0: rank -> its control connection.
    """

    control: socket.socket
    peers: dict[int, socket.socket]
    accepted: dict[int, socket.socket]

    def close(self) -> None:
        """Closes all connections."""
        for sock in (self.control, *self.peers.values(), *self.accepted.values()):
            sock.close()


def connect_ranks(
    ranks: Ranks, settings: Settings, lost: Callable[[], str] = str, server: socket.socket | None = None
) -> Connections:
    """Returns the connections of this rank when all ranks are connected to each other.

    Args:
      ranks: Ranks of this process.
      settings: Timeouts and the secret of the job.
      lost: Polled. Returns a message about a rank that failed to start, or an empty string.
      server: A socket that listens at this rank's address. None creates one.

    Raises UsageError if this rank cannot listen at its address, cannot open enough files or is refused,
    its subclass PortInUseError if only the port is taken, and HorovodInternalError if some ranks do not
    connect within `start_timeout` seconds.
    """
    rendezvous = _Rendezvous(ranks, settings, lost, server)
    try:
        return rendezvous.run()
    except BaseException:
        rendezvous.give_up()
        raise
    finally:
        rendezvous.close()


class _Rendezvous:
    def __init__(
        self, ranks: Ranks, settings: Settings, lost: Callable[[], str], server: socket.socket | None
    ):
        self._ranks = ranks
        self._lost = lost
        self._settings = settings
        self._deadline = Deadline(settings.start_timeout, _TELL_EVERY_SECS, has_backoff=False)
        self._peers: dict[int, socket.socket] = {}
        self._accepted: dict[int, socket.socket] = {}
        self._control: socket.socket | None = None
        check_descriptors(ranks.size)
        self._call_error = ""  # error of the newest call
        self._listener = Listener(server or self._listening(), self._endpoint(ranks.rank), self._refusal)
        self._arrivals: queue.SimpleQueue[tuple[socket.socket, dict]] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._wakes, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="hvd-rendezvous", daemon=True)
        self._thread.start()

    def run(self) -> Connections:
        """Connects to the lower ranks and accepts the connections of the higher ones."""
        ranks = self._ranks
        if ranks.rank == 0:
            self._accepted[0], self._control = socket.socketpair()
        calls = [("peer", rank) for rank in range(ranks.rank)]
        if ranks.rank:
            calls.insert(0, ("control", 0))
        caller: Caller | None = None
        while not self._is_complete():
            if calls:
                role, rank = calls[0]
                caller = caller or self._caller(role, rank)
                sock = self._connect(caller, rank)
                if sock is not None:
                    calls.pop(0)
                    caller = None
                    if role == "control":
                        self._control = sock
                    else:
                        self._peers[rank] = sock
            self._accept_arrivals(0.0 if calls or self._is_complete() else 0.2)
            self._check_deadline({rank for _, rank in calls})
        assert self._control is not None
        return Connections(self._control, dict(sorted(self._peers.items())), self._accepted)

    def close(self) -> None:
        """Stops listening: no port of this rank is open afterwards."""
        self._is_over.set()
        self._wake.close()
        self._thread.join()
        self._wakes.close()
        self._listener.close()
        while not self._arrivals.empty():
            self._arrivals.get()[0].close()

    def give_up(self) -> None:
        """Closes the existing connections."""
        for sock in (*self._peers.values(), *self._accepted.values(), self._control):
            if sock is not None:
                sock.close()

    def _is_complete(self) -> bool:
        ranks = self._ranks
        accepted = ranks.rank > 0 or len(self._accepted) == ranks.size
        return self._control is not None and accepted and len(self._peers) == ranks.size - 1

    def _endpoint(self, rank: int) -> Endpoint:
        return Endpoint(self._settings.secret, "ranks", f"rank {rank}")

    def _listening(self) -> socket.socket:
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
        """Accepts connections in a separate thread, while `run` waits for the ranks that it calls."""
        poller = select.poll()
        poller.register(self._listener.fileno(), select.POLLIN)
        poller.register(self._wakes.fileno(), select.POLLIN)
        while not self._is_over.is_set():
            poller.poll(1000 * _LOOK_SECS)
            for arrival in self._listener.accept_callers():
                self._arrivals.put(arrival)

    def _caller(self, role: str, rank: int) -> Caller:
        claim = {"role": role, "rank": self._ranks.rank, **self._common()}
        address = split_address(self._ranks.addresses[rank])
        return Caller(address, self._endpoint(rank), claim, pause_secs=_RETRY_SECS)

    def _connect(self, caller: Caller, rank: int) -> socket.socket | None:
        try:
            sock = caller.call(self._deadline.remaining_secs)
        except ChannelRefusedError as e:
            raise UsageError(f"rank {rank} refused rank {self._ranks.rank}: {e}") from None
        if sock is None:
            self._call_error = f"rank {rank}: {caller.failure}"
            caller.pause()
        return sock

    def _common(self) -> dict:
        ranks = self._ranks
        return {"protocol": _PROTOCOL, "size": ranks.size, "generation": ranks.generation}

    def _accept_arrivals(self, wait_secs: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sock, claim = self._arrivals.get(timeout=wait_secs or None, block=wait_secs > 0)
                wait_secs = 0.0
                accepted = self._accepted if claim["role"] == "control" else self._peers
                previous = accepted.get(claim["rank"])
                if previous is not None:  # the rank has connected again, without the answer
                    previous.close()
                accepted[claim["rank"]] = sock

    def _refusal(self, claim: dict[str, Any]) -> ChannelRefusedError | None:
        for name, expected in self._common().items():
            if claim.get(name) != expected:
                text = f"its {name} is {claim.get(name)}, here it is {expected}; start all ranks alike."
                return ChannelRefusedError(
                    text, can_retry=claim.get("generation") != self._ranks.generation
                )
        role, rank, ranks = claim.get("role"), claim.get("rank"), self._ranks
        if role == "control" and ranks.rank:
            return ChannelRefusedError(f"{ranks.addresses[ranks.rank]} is rank {ranks.rank}, not rank 0.")
        if role not in ("control", "peer") or type(rank) is not int or not ranks.rank < rank < ranks.size:
            last = ranks.size - 1
            return ChannelRefusedError(f"rank {rank} came; expected one of {ranks.rank + 1} to {last}.")
        return None

    def _check_deadline(self, called: set[int]) -> None:
        """Raises an error after the deadline or if a rank failed to start. Logs missing ranks before.

        Args:
          called: Ranks to which this rank has not connected yet.
        """
        failure, deadline = self._lost(), self._deadline
        if failure:
            raise HorovodInternalError(failure)
        if not (deadline.is_over or deadline.is_reminder_due()):
            return
        ranks = self._ranks
        missing = called | (set(range(ranks.size)) - {ranks.rank} - self._peers.keys())
        names = ", ".join(f"{rank} ({ranks.addresses[rank]})" for rank in sorted(missing)[:8])
        text = f"rank {ranks.rank} of {ranks.size} waits for rank {names}"
        if deadline.is_over:
            call = f" The last call, to {self._call_error}." if called and self._call_error else ""
            raise HorovodInternalError(
                f"{text}: not here after {deadline.timeout_secs:g} s. Do these processes run, "
                "and can their ports be reached from here? (HOROVOD_START_TIMEOUT gives them longer)"
                f"{call}{listener_sentence(self._listener)}{refusal_sentence(self._listener)}"
            )
        print(f"hvd: {text}", file=sys.stderr, flush=True)
