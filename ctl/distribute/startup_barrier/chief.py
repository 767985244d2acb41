"""Chief's side of the startup barrier: accepts the workers, compares them and releases them.

    Chief(cluster, facts, timeout_secs=600.0).run()

`ctl.distribute.startup_barrier.worker` is the other side. A connection that cannot authenticate as a part
of this job is closed and has no effect.
"""

import contextlib
import errno
import json
import logging
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from ctl.distribute import own_port
from ctl.distribute.job_fingerprint import CODE
from ctl.distribute.startup_barrier import messages
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError
from ctl.io import authenticated_channel
from ctl.io.authenticated_channel import PROOF_SECS, ChannelRefusedError, Endpoint, Listener
from ctl.io.rendezvous import Deadline, listener_sentence, listening_socket, refusal_sentence

_log = logging.getLogger("ctl")


@dataclass(eq=False)
class _Guest:
    """An authenticated worker.

    Attributes:
      process: Random identifier of the process. A second process of the same rank has another one.
      heard: Received bytes of an incomplete message with the facts.
      facts: Fingerprint of the worker. None until it has been received.
    """

    rank: int
    process: str
    connection: socket.socket
    heard: bytes = b""
    facts: dict[str, str] | None = None
    since_secs: float = field(default_factory=time.monotonic)


class Chief:
    """Server of the startup barrier. Accepts workers, logs missing ones and compares their facts."""

    def __init__(self, cluster: Topology, facts: dict[str, str], timeout_secs: float):
        self._cluster = cluster
        self._facts = facts
        self._timeout_secs = timeout_secs
        self._guests: dict[int, _Guest] = {}  # by rank
        self._fault = ""  # error message about an authenticated process
        self._secret = authenticated_channel.job_secret()
        endpoint = Endpoint(self._secret, messages.PURPOSE, messages.IDENTITY)
        self._listener = Listener(_listen(cluster), endpoint, self._refusal)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Waits for all workers. Raises PeerLostError if one is missing, UsageError if one differs."""
        deadline = Deadline(self._timeout_secs, messages.NAME_SECS)
        with contextlib.closing(self):
            while (missing := self._missing()) and not self._fault:
                if deadline.is_over:
                    text = messages.too_long(self._timeout_secs, self._names(missing))
                    text += listener_sentence(self._listener, "The chief")
                    text += refusal_sentence(self._listener)
                    self._tell({"timeout": text})
                    raise PeerLostError(text)
                if deadline.is_reminder_due():
                    text = f"{deadline.waited_secs:.0f} s: still waiting for {self._names(missing)}."
                    text += refusal_sentence(self._listener)
                    _log.warning("%s", text)
                    self._tell({"waiting": text})
                self._listen_once()
            wrong = self._fault or self._difference()
            self._tell({"refused": wrong} if wrong else {"go": True})
            self._see_them_off()
        if wrong:
            raise UsageError(wrong)

    def close(self) -> None:
        """Closes all connections and frees the port."""
        self._selector.close()
        self._listener.close()
        for guest in self._guests.values():
            guest.connection.close()

    def _here(self) -> list[tuple[_Guest, dict[str, str]]]:
        found = [(g, g.facts) for _, g in sorted(self._guests.items())]
        return [(guest, facts) for guest, facts in found if facts is not None]

    def _missing(self) -> list[int]:
        here = {guest.rank for guest, _ in self._here()}
        return [r for r in range(1, self._cluster.num_workers) if r not in here]

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(messages.name_of(self._cluster, r) for r in ranks)

    def _listen_once(self) -> None:
        for key, _ in self._selector.select(messages.CALL_AGAIN_SECS):
            if isinstance(key.data, _Guest):
                self._hear(key.data)
        for connection, claim in self._listener.accept_callers():
            self._welcome(_Guest(claim["rank"], claim["process"], connection))
        now = time.monotonic()
        for guest in list(self._guests.values()):
            if guest.facts is None and now - guest.since_secs > PROOF_SECS:
                self._forget(guest)

    def _refusal(self, claim: dict[str, Any]) -> ChannelRefusedError | None:
        """Returns the error for an invalid worker, or None. Only an authenticated one can end the job."""
        rank, process, size = claim.get("rank"), claim.get("process"), self._cluster.num_workers
        is_known = type(rank) is int and 0 < rank < size
        if not (is_known and isinstance(process, str)):
            why = f"a process says that it is number {rank!r} of {size}"
        elif rank in self._guests and self._guests[rank].process != process:
            why = f"two processes say that they are {messages.name_of(self._cluster, rank)}"
        else:
            return None
        text = f"{why}. Every process needs a task index of its own in TF_CONFIG."
        if self._secret:
            self._fault = self._fault or text
        else:
            _log.warning("Refused: %s", text)
        return ChannelRefusedError(text)

    def _welcome(self, guest: _Guest) -> None:
        if guest.rank in self._guests:  # the same process has reconnected
            self._forget(self._guests[guest.rank])
        guest.connection.setblocking(False)
        self._guests[guest.rank] = guest
        self._selector.register(guest.connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> None:
        data = _received(guest.connection)
        if data is None:
            return
        if guest.facts is None:
            guest.heard += data
        if not data or len(guest.heard) > messages.MOST_LINE_BYTES:
            self._forget(guest)
        elif guest.facts is None and b"\n" in guest.heard:
            guest.facts, guest.heard = _facts_of(guest.heard), b""
            if guest.facts is None:
                self._forget(guest)

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.connection)
        guest.connection.close()
        del self._guests[guest.rank]

    def _difference(self) -> str | None:
        lines = []
        for guest, facts in self._here():
            for key in sorted({*facts, *self._facts}):
                here, there = self._facts.get(key, "nothing"), facts.get(key, "nothing")
                loaded_by_one = key.startswith(CODE) and "nothing" in (here, there)
                if here != there and not loaded_by_one:
                    who = messages.name_of(self._cluster, guest.rank)
                    lines.append(f"  {key}: {there[:300]} on {who}, {here[:300]} on the chief")
        if not lines:
            return None
        more = [f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else []
        return (
            "The workers of this job are not alike; nothing was started.\n"
            + "\n".join(lines[:20] + more)
            + "\nStart the same command, with the same versions, on every worker."
        )

    def _tell(self, message: dict) -> None:
        for guest in self._guests.values():  # also to workers that have not sent their facts
            _send(guest.connection, message)

    def _see_them_off(self) -> None:
        """Waits until workers have closed their connections, which allows TensorFlow to bind the port."""
        until_secs = time.monotonic() + messages.LEAVE_SECS
        while self._guests and time.monotonic() < until_secs:
            for key, _ in self._selector.select(messages.CALL_AGAIN_SECS):
                if isinstance(key.data, _Guest) and _received(key.data.connection) == b"":
                    self._forget(key.data)
            for connection, _ in self._listener.accept_callers():
                connection.close()


def _facts_of(line: bytes) -> dict[str, str] | None:
    """Returns the facts in a worker's message by name, or None for an invalid message."""
    try:
        found = json.loads(line)["facts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_text = isinstance(found, dict) and all(isinstance(v, str) for v in found.values())
    return found if is_text else None


def _listen(cluster: Topology) -> socket.socket:
    host, port = messages.address_of(cluster, 0)
    try:
        return listening_socket(host, port)
    except OSError as e:
        if e.errno == errno.EADDRINUSE and cluster.port_variable != "TF_CONFIG":
            raise own_port.port_error(cluster) from None
        raise UsageError(
            f"This chief's own address {host}:{port} cannot be bound ({e.strerror or e}). Write an "
            "address of this machine and a free port into TF_CONFIG of every worker."
        ) from None


def _send(connection: socket.socket, message: dict) -> None:
    """Sends a message without blocking. It is lost if the worker does not read."""
    with contextlib.suppress(OSError):
        connection.sendall(messages.line(message))


def _received(connection: socket.socket) -> bytes | None:
    """Returns the available bytes, b"" at the end of the connection, None if no bytes are available."""
    try:
        return connection.recv(65536)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""
