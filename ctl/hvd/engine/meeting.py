"""How the ranks find each other: every one listens, and calls those of lower rank.

Who calls proves that it knows the job's secret, and so does who answers; the secret itself does not
travel. Ranks of another job, of another version or of an earlier group are refused by name.
"""

import contextlib
import hmac
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from ctl.errors import UsageError
from ctl.hvd.engine.frames import Inbox, Lost, packed
from ctl.hvd.engine.settings import Settings
from ctl.hvd.errors import HorovodInternalError
from ctl.placement import Placement

_PROTOCOL = 1
_SHAKE_SECS = 30.0
_TELL_EVERY_SECS = 30.0


@dataclass
class Connections:
    """What one rank holds once all have met.

    Attributes:
      control: to rank 0.
      peers: rank -> socket to it.
      accepted: on rank 0, rank -> its control connection.
    """

    control: socket.socket
    peers: dict[int, socket.socket]
    accepted: dict[int, socket.socket]


def meet(place: Placement, settings: Settings, lost: Callable[[], str] = str) -> Connections:
    """Returns when every rank is connected to every other.

    Args:
      lost: asked again and again; what it says of a rank that will not come, if anything.

    Raises UsageError if this rank cannot listen at its address or is not let in, and
    HorovodInternalError if some do not come within `start_timeout` seconds, or will not.
    """
    meeting = _Meeting(place, settings, lost)
    try:
        return meeting.run()
    except BaseException:
        meeting.give_up()
        raise
    finally:
        meeting.close()


class _Meeting:
    def __init__(self, place: Placement, settings: Settings, lost: Callable[[], str]):
        self._place = place
        self._lost = lost
        self._settings = settings
        self._deadline = time.monotonic() + settings.start_timeout
        self._tell_at = time.monotonic() + _TELL_EVERY_SECS
        self._peers: dict[int, socket.socket] = {}
        self._accepted: dict[int, socket.socket] = {}
        self._control: socket.socket | None = None
        self._listener = self._listening()

    def run(self) -> Connections:
        """Calls the lower ranks and takes the calls of the higher ones."""
        place = self._place
        if place.rank == 0:
            self._accepted[0], self._control = socket.socketpair()
        calls = [("peer", rank) for rank in range(place.rank)]
        if place.rank:
            calls.insert(0, ("control", 0))
        while not self._is_complete():
            if calls:
                role, rank = calls[0]
                sock = self._called(role, rank)
                if sock is not None:
                    calls.pop(0)
                    if role == "control":
                        self._control = sock
                    else:
                        self._peers[rank] = sock
            self._take_a_call(0.0 if calls else 0.2)
            self._tell_and_give_up(calls)
        assert self._control is not None
        return Connections(self._control, self._peers, self._accepted)

    def close(self) -> None:
        """Listens no more."""
        self._listener.close()

    def give_up(self) -> None:
        """Closes what is connected already."""
        found = [*self._peers.values(), *self._accepted.values(), self._control]
        for sock in found:
            if sock is not None:
                sock.close()

    def _is_complete(self) -> bool:
        place = self._place
        accepted = place.rank > 0 or len(self._accepted) == place.size
        return self._control is not None and accepted and len(self._peers) == place.size - 1

    def _listening(self) -> socket.socket:
        host, _, port = self._place.addresses[self._place.rank].rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_own = host in ("localhost", "::1") or host.startswith("127.")
        last: OSError | None = None
        for bound in [host] if is_own else [host, ""]:
            try:
                sock = socket.create_server((bound, int(port)), family=family, backlog=1024)
            except OSError as e:
                last = e
                continue
            sock.setblocking(False)
            return sock
        raise UsageError(
            f"rank {self._place.rank} cannot listen at {host}:{port} ({last}); expected an address of "
            "this machine and a free port. Is another process of the job still running?"
        )

    def _called(self, role: str, rank: int) -> socket.socket | None:
        host, _, port = self._place.addresses[rank].rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=2.0)
        except OSError:
            time.sleep(0.05)
            return None
        try:
            sock.settimeout(_SHAKE_SECS)
            self._introduce(sock, role, rank)
        except (Lost, OSError):
            sock.close()
            time.sleep(0.05)
            return None
        except BaseException:
            sock.close()
            raise
        return _tuned(sock)

    def _introduce(self, sock: socket.socket, role: str, rank: int) -> None:
        inbox, nonce = Inbox(), os.urandom(16).hex()
        hello = {"role": role, "rank": self._place.rank, **self._common(), "nonce": nonce}
        _say(sock, hello)
        answer = _heard(sock, inbox)
        if "refused" in answer:
            if answer.get("again"):
                raise Lost("not yet")
            raise UsageError(f"rank {rank} refused rank {self._place.rank}: {answer['refused']}")
        if not hmac.compare_digest(answer["proof"], self._proof(nonce, f"answer {rank}")):
            raise UsageError(f"rank {rank} does not know the secret of this job (CTL_HVD_SECRET).")
        _say(sock, {"proof": self._proof(answer["nonce"], f"{role} {self._place.rank}")})
        if "welcome" not in _heard(sock, inbox):
            raise UsageError(f"rank {rank} refused rank {self._place.rank}.")

    def _common(self) -> dict:
        place = self._place
        return {"protocol": _PROTOCOL, "size": place.size, "generation": place.generation}

    def _proof(self, nonce: str, what: str) -> str:
        return hmac.new(self._settings.secret, f"{what} {nonce}".encode(), "sha256").hexdigest()

    def _take_a_call(self, wait: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            if not selector.select(wait):
                return
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        try:
            sock.settimeout(_SHAKE_SECS)
            self._admit(sock)
        except (Lost, OSError, KeyError, ValueError, TypeError):
            sock.close()

    def _admit(self, sock: socket.socket) -> None:
        inbox = Inbox()
        hello = _heard(sock, inbox)
        refused = self._refusal(hello)
        if refused:
            _say(
                sock,
                {"refused": refused, "again": hello.get("generation", 0) != self._place.generation},
            )
            raise Lost(refused)
        role, rank = str(hello["role"]), int(hello["rank"])
        nonce = os.urandom(16).hex()
        mine = self._proof(str(hello["nonce"]), f"answer {self._place.rank}")
        _say(sock, {"nonce": nonce, "proof": mine})
        if not hmac.compare_digest(
            str(_heard(sock, inbox)["proof"]), self._proof(nonce, f"{role} {rank}")
        ):
            _say(sock, {"refused": "secret"})
            raise Lost("a wrong secret")
        _say(sock, {"welcome": True})
        connections = self._accepted if role == "control" else self._peers
        if rank in connections:
            connections[rank].close()
        connections[rank] = _tuned(sock)

    def _refusal(self, hello: dict) -> str:
        for what, mine in self._common().items():
            if hello.get(what) != mine:
                return f"its {what} is {hello.get(what)}, here it is {mine}; start all ranks alike."
        if hello["role"] == "control" and self._place.rank:
            return (
                f"{self._place.addresses[self._place.rank]} is rank {self._place.rank}, not rank 0."
            )
        return ""

    def _tell_and_give_up(self, calls: list[tuple[str, int]]) -> None:
        now, why = time.monotonic(), self._lost()
        if why:
            raise HorovodInternalError(why)
        if now < min(self._tell_at, self._deadline):
            return
        place = self._place
        waits = set(range(place.size)) - {place.rank} - set(self._peers)
        waits |= {rank for _, rank in calls}
        named = ", ".join(f"{rank} ({place.addresses[rank]})" for rank in sorted(waits)[:8])
        text = f"rank {place.rank} of {place.size} waits for rank {named}"
        if now >= self._deadline:
            raise HorovodInternalError(
                f"{text}: not here after {self._settings.start_timeout:g} s. Do these processes run, "
                "and can their ports be reached from here? (HOROVOD_START_TIMEOUT gives them longer)"
            )
        self._tell_at = now + _TELL_EVERY_SECS
        print(f"hvd: {text}", file=sys.stderr, flush=True)


def _say(sock: socket.socket, header: dict) -> None:
    sock.sendall(b"".join(packed(header)))


def _heard(sock: socket.socket, inbox: Inbox) -> dict:
    while True:
        for header, _ in inbox.messages():
            return header
        inbox.read(sock)


def _tuned(sock: socket.socket) -> socket.socket:
    """Small messages leave at once, and a machine that went silent is noticed."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock
