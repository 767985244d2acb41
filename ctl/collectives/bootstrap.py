"""How the ranks find each other: every one listens, and calls those of lower rank.

Both prove to each other that they know the job's secret (`ctl.io.authenticated_channel`). Ranks of
another version, of another number or of an earlier group are refused by name. Once all have met, no
port is open.
"""

import contextlib
import errno
import itertools
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
from ctl.collectives.settings import SOCKETS_VARIABLE, Settings
from ctl.errors import UsageError
from ctl.io.authenticated_channel import ChannelRefusedError, Endpoint, Listener
from ctl.io.rendezvous import Caller, Deadline, listening, listening_place, refusals, split_address

_PROTOCOL = 5
_TELL_EVERY_SECS = 30.0
_LOOK_SECS = 0.1
_RETRY_SECS = 0.05
_SOCKETS_BETWEEN_MACHINES = 4
_SOCKETS_OF_ALL_PAIRS = 256  # of one process, to all others; one is always allowed


@dataclass
class Connections:
    """What one rank holds once all have met.

    Attributes:
      control: to rank 0.
      peers: rank -> sockets to it, in the same order on both ends.
      accepted: on rank 0, rank -> its control connection.
    """

    control: socket.socket
    peers: dict[int, list[socket.socket]]
    accepted: dict[int, socket.socket]

    def close(self) -> None:
        """Ends them all."""
        peers = itertools.chain(*self.peers.values())
        for sock in (self.control, *peers, *self.accepted.values()):
            sock.close()


def connect_ranks(
    place: Ranks, settings: Settings, lost: Callable[[], str] = str, server: socket.socket | None = None
) -> Connections:
    """Returns when every rank is connected to every other.

    Args:
      lost: asked again and again; what it says of a rank that will not come, if anything.
      server: a socket that listens at this rank's address; None makes one.

    Raises UsageError if this rank cannot listen at its address, cannot open enough files or is refused,
    its subclass PortInUseError if only the port is taken, and HorovodInternalError if some ranks do not
    connect within `start_timeout` seconds.
    """
    meeting = _Meeting(place, settings, lost, server)
    try:
        return meeting.run()
    except BaseException:
        meeting.give_up()
        raise
    finally:
        meeting.close()


class _Meeting:
    def __init__(
        self, place: Ranks, settings: Settings, lost: Callable[[], str], server: socket.socket | None
    ):
        self._place = place
        self._lost = lost
        self._settings = settings
        self._deadline = Deadline(settings.start_timeout, _TELL_EVERY_SECS, ever_more_rarely=False)
        self._peers: dict[tuple[int, int], socket.socket] = {}  # by rank, and number of that pair
        self._accepted: dict[int, socket.socket] = {}
        self._control: socket.socket | None = None
        others = (rank for rank in range(place.size) if rank != place.rank)
        self._counts = {rank: self._count(rank) for rank in others}  # of sockets
        check_descriptors(sum(self._counts.values()), place.size)
        self._why = ""  # the newest call came to nothing
        self._listener = Listener(server or self._listening(), self._endpoint(place.rank), self._refusal)
        self._arrivals: queue.SimpleQueue[tuple[socket.socket, dict]] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._wakes, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="hvd-meeting", daemon=True)
        self._thread.start()

    def run(self) -> Connections:
        """Calls the lower ranks and takes the calls of the higher ones."""
        place = self._place
        if place.rank == 0:
            self._accepted[0], self._control = socket.socketpair()
        calls = [("peer", rank, i) for rank in range(place.rank) for i in range(self._counts[rank])]
        if place.rank:
            calls.insert(0, ("control", 0, 0))
        caller: Caller | None = None
        while not self._is_complete():
            if calls:
                role, rank, number = calls[0]
                caller = caller or self._caller(role, rank, number)
                sock = self._called(caller, rank)
                if sock is not None:
                    calls.pop(0)
                    caller = None
                    if role == "control":
                        self._control = sock
                    else:
                        self._peers[rank, number] = sock
            self._take_arrivals(0.0 if calls or self._is_complete() else 0.2)
            self._tell_and_give_up({rank for _, rank, _ in calls})
        assert self._control is not None
        peers = {r: [self._peers[r, i] for i in range(count)] for r, count in self._counts.items()}
        return Connections(self._control, peers, self._accepted)

    def close(self) -> None:
        """Listens no more: from here on no port of this rank is open."""
        self._is_over.set()
        self._wake.close()
        self._thread.join()
        self._wakes.close()
        self._listener.close()
        while not self._arrivals.empty():
            self._arrivals.get()[0].close()

    def give_up(self) -> None:
        """Closes what is connected already."""
        found = [*self._peers.values(), *self._accepted.values(), self._control]
        for sock in found:
            if sock is not None:
                sock.close()

    def _is_complete(self) -> bool:
        place = self._place
        accepted = place.rank > 0 or len(self._accepted) == place.size
        return self._control is not None and accepted and len(self._peers) == sum(self._counts.values())

    def _count(self, rank: int) -> int:
        """Sockets between this rank and another one: what both find."""
        addresses = self._place.addresses
        mine, other = (split_address(addresses[r])[0] for r in (self._place.rank, rank))
        wanted = self._settings.sockets or (1 if mine == other else _SOCKETS_BETWEEN_MACHINES)
        return max(1, min(wanted, _SOCKETS_OF_ALL_PAIRS // (self._place.size - 1)))

    def _endpoint(self, rank: int) -> Endpoint:
        return Endpoint(self._settings.secret, "ranks", f"rank {rank}")

    def _listening(self) -> socket.socket:
        place = self._place
        try:
            return listening(*split_address(place.addresses[place.rank]))
        except OSError as e:
            is_taken = e.errno == errno.EADDRINUSE
            raise (PortInUseError if is_taken else UsageError)(
                f"rank {place.rank} cannot listen at {place.addresses[place.rank]} ({e}); expected an "
                "address of this machine and a free port. Is another process of the job still running?"
            ) from None

    def _listen(self) -> None:
        """In a thread of its own, so that who calls is not delayed by whom we call."""
        poller = select.poll()
        poller.register(self._listener.fileno(), select.POLLIN)
        poller.register(self._wakes.fileno(), select.POLLIN)
        while not self._is_over.is_set():
            poller.poll(1000 * _LOOK_SECS)
            for arrival in self._listener.accepted():
                self._arrivals.put(arrival)

    def _caller(self, role: str, rank: int, number: int) -> Caller:
        claim = {"role": role, "rank": self._place.rank, "number": number, **self._common()}
        address = split_address(self._place.addresses[rank])
        return Caller(address, self._endpoint(rank), claim, pause_secs=_RETRY_SECS)

    def _called(self, caller: Caller, rank: int) -> socket.socket | None:
        try:
            sock = caller.call(self._deadline.left_secs)
        except ChannelRefusedError as e:
            raise UsageError(f"rank {rank} refused rank {self._place.rank}: {e}") from None
        if sock is None:
            self._why = f"rank {rank}: {caller.why}"
            caller.pause()
        return sock

    def _common(self) -> dict:
        place = self._place
        return {
            "protocol": _PROTOCOL,
            "size": place.size,
            SOCKETS_VARIABLE: self._settings.sockets,
            "generation": place.generation,
        }

    def _take_arrivals(self, wait_secs: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sock, claim = self._arrivals.get(timeout=wait_secs or None, block=wait_secs > 0)
                wait_secs = 0.0
                rank, key = claim["rank"], (claim["rank"], claim["number"])
                is_control = claim["role"] == "control"
                known = self._accepted.get(rank) if is_control else self._peers.get(key)
                if known is not None:  # it did not hear that it was welcome
                    known.close()
                if is_control:
                    self._accepted[rank] = sock
                else:
                    self._peers[key] = sock

    def _refusal(self, claim: dict[str, Any]) -> ChannelRefusedError | None:
        for what, mine in self._common().items():
            if claim.get(what) != mine:
                text = f"its {what} is {claim.get(what)}, here it is {mine}; start all ranks alike."
                return ChannelRefusedError(text, again=claim.get("generation") != self._place.generation)
        role, rank, place = claim.get("role"), claim.get("rank"), self._place
        if role == "control" and place.rank:
            return ChannelRefusedError(f"{place.addresses[place.rank]} is rank {place.rank}, not rank 0.")
        if role not in ("control", "peer") or type(rank) is not int or not place.rank < rank < place.size:
            last = place.size - 1
            return ChannelRefusedError(f"rank {rank} came; expected one of {place.rank + 1} to {last}.")
        number, count = claim.get("number"), self._counts[rank]
        if role == "peer" and (type(number) is not int or not 0 <= number < count):
            return ChannelRefusedError(f"its connection {number} came; expected 0 to {count - 1}.")
        return None

    def _tell_and_give_up(self, called: set[int]) -> None:
        """`called`: ranks that this one has not reached yet."""
        why, deadline = self._lost(), self._deadline
        if why:
            raise HorovodInternalError(why)
        if not (deadline.is_over or deadline.is_due()):
            return
        place = self._place
        counts = self._counts.items()
        waits = called | {r for r, n in counts if any((r, i) not in self._peers for i in range(n))}
        named = ", ".join(f"{rank} ({place.addresses[rank]})" for rank in sorted(waits)[:8])
        text = f"rank {place.rank} of {place.size} waits for rank {named}"
        if deadline.is_over:
            why = f" The last call, to {self._why}." if called and self._why else ""
            raise HorovodInternalError(
                f"{text}: not here after {deadline.timeout_secs:g} s. Do these processes run, "
                "and can their ports be reached from here? (HOROVOD_START_TIMEOUT gives them longer)"
                f"{why}{listening_place(self._listener)}{refusals(self._listener)}"
            )
        print(f"hvd: {text}", file=sys.stderr, flush=True)
