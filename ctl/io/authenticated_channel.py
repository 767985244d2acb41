"""Connections between the processes of one job: who connects proves first that it knows the job's secret.

    endpoint = Endpoint(secret, "elastic", "launcher")

    listener = Listener(server_socket, endpoint, judge)          # who listens
    for connection, claim in listener.accepted(wait_secs=0.2): ...

    connection = connect(("host1", 40213), endpoint, {"worker": 3})      # who calls

The protocol, with fixed roles and a random nonce of each side:

    listener -> caller   magic, listener's nonce
    caller -> listener   magic, caller's nonce, length, claim (JSON), HMAC("caller", claim)
    listener -> caller   length, verdict (JSON), HMAC("listener", claim, verdict)

Each HMAC-SHA256 also covers the purpose of the port, the listener's identity and both nonces. So no
message can be sent back to its sender, replayed, or used at another port. The secret does not travel.
Nothing of a caller is parsed before its proof; until then it may send some hundred bytes and stay for
`PROOF_SECS`. What follows after the proof is neither encrypted nor signed. Without a secret (b"") the
limits hold, but nobody is authenticated.
"""

import contextlib
import hashlib
import hmac
import json
import os
import resource
import secrets
import selectors
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SECRET_VARIABLE = "CTL_HVD_SECRET"
PROOF_SECS = 5.0
PEER_TIMEOUT_SECS = 60.0
MOST_CLAIM_BYTES = 512
MOST_STRANGERS = 256

_MAGIC = b"ctl-1\r\n\0"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct(">H")
_FIRST_BYTES = len(_MAGIC) + _NONCE_BYTES
_HEAD_BYTES = _FIRST_BYTES + _LENGTH.size
_MOST_VERDICT_BYTES = 2048
_MOST_REASON = 400  # characters
_ACCEPTS_AT_ONCE = 64
_FULL_SECS = 0.05  # for file descriptors to become free


class ChannelError(ConnectionError):
    """No authenticated connection was made."""


class UnprovenError(ChannelError):
    """Who listens there is no process of this job, or did not say so in time."""


class LateProofError(UnprovenError):
    """It said nothing in time."""


class ChannelRefusedError(ChannelError):
    """The listener of this job does not want this caller; `again` if it may later."""

    def __init__(self, reason: str, *, again: bool = False):
        super().__init__(reason)
        self.again = again


@dataclass(frozen=True)
class Endpoint:
    """What a port is for; equal on both sides of a connection.

    Attributes:
      secret: known to the processes of one job only; b"" if there is none.
      purpose: "startup", "ranks", ...; a proof for one purpose is worth nothing for another.
      identity: who listens, such as "rank 0".
    """

    secret: bytes = field(repr=False)
    purpose: str
    identity: str

    def proof(self, role: str, *parts: bytes) -> bytes:
        """HMAC of these parts for a role, "caller" or "listener"."""
        mac = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (role.encode(), self.purpose.encode(), self.identity.encode(), *parts):
            mac.update(len(part).to_bytes(4, "big") + part)
        return mac.digest()


Judge = Callable[[dict[str, Any]], ChannelRefusedError | None]


def job_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret that the launcher gave to this process; b"" without a launcher."""
    return environ.get(SECRET_VARIABLE, "").encode()


def tuned(connection: socket.socket) -> socket.socket:
    """The same socket: small messages leave at once, and a silent machine is noticed within a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": 10,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": int(1000 * PEER_TIMEOUT_SECS),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


class Listener:
    """Authenticates any number of callers at a time without waiting for one; used by one thread.

    It does not delay a caller when others are silent, slow or send garbage: each has `PROOF_SECS`, and
    when more than `MOST_STRANGERS` are there the one that has been silent for longest goes.

    Attributes:
      refused: connections that were closed without a proof; last_refused: the address of the newest.
    """

    def __init__(self, server: socket.socket, endpoint: Endpoint, judge: Judge = lambda claim: None):
        """Takes a listening socket over.

        Args:
          judge: claim of an authenticated caller -> None to accept it, or why not.
        """
        self.refused = 0
        self.last_refused = ""
        self._server = server
        self._endpoint = endpoint
        self._judge = judge
        self._strangers: OrderedDict[socket.socket, _Stranger] = OrderedDict()  # oldest first
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST_STRANGERS if soft < 0 else max(8, min(MOST_STRANGERS, soft // 4))
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    @property
    def address(self) -> tuple[str, int]:
        """IP address and port of the listening socket."""
        host, port = self._server.getsockname()[:2]
        return host, port

    def accepted(self, wait_secs: float = 0.0) -> list[tuple[socket.socket, dict[str, Any]]]:
        """Callers that have proven themselves: blocking sockets, and what each claims to be."""
        found = []
        for key, _ in self._selector.select(wait_secs):
            if key.fileobj is self._server:
                self._accept()
                continue
            stranger = self._strangers.get(key.fileobj)  # type: ignore[call-overload]
            if stranger is None:
                continue
            try:
                if stranger.has_proven():
                    claim = stranger.judged(self._judge)
                    self._release(stranger.socket)
                    found.append((tuned(stranger.socket), claim))
            except _Refused:
                self._release(stranger.socket)
                stranger.socket.close()  # in order, so that the verdict arrives
            except _NotOurs:
                self._drop(stranger.socket)
        now = time.monotonic()
        while self._strangers and next(iter(self._strangers.values())).until_secs <= now:
            self._drop(next(iter(self._strangers)))
        return found

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to do for `accepted`."""
        return self._selector.fileno()

    def close(self) -> None:
        """Listens no more; connections that are not authenticated end."""
        for connection in list(self._strangers):
            self._drop(connection)
        self._selector.close()
        self._server.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = self._server.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # no file descriptor is free
                if self._strangers:
                    self._drop(next(iter(self._strangers)))
                else:
                    time.sleep(_FULL_SECS)
                return
            if len(self._strangers) >= self._most:
                self._drop(next(iter(self._strangers)))
            stranger = _Stranger(connection, str(address[0]), self._endpoint)
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                stranger.greet()
            except _NotOurs:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self.refused += 1
        self.last_refused = self._strangers[connection].address
        self._release(connection)
        with contextlib.suppress(OSError):  # a reset: the kernel keeps nothing of it for minutes
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def _release(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection)


class _NotOurs(Exception):
    """A caller that is not authenticated."""


class _Refused(Exception):
    """An authenticated caller that was told that it is not wanted."""


class _Stranger:
    """One caller until its proof."""

    def __init__(self, connection: socket.socket, address: str, endpoint: Endpoint):
        self.socket = connection
        self.address = address
        self.until_secs = time.monotonic() + PROOF_SECS
        self._endpoint = endpoint
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._came = b""
        self._claim = b""
        connection.setblocking(False)

    def greet(self) -> None:
        self._send(_MAGIC + self._nonce)

    def has_proven(self) -> bool:
        """Reads what is there; raises _NotOurs for anything that is no proof."""
        while (missing := self._needed() - len(self._came)) > 0:
            try:
                data = self.socket.recv(missing)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as e:
                raise _NotOurs from e
            self._came += data
            begun = self._came[: len(_MAGIC)]
            if not data or begun != _MAGIC[: len(begun)]:
                raise _NotOurs
        claim, proof = self._came[_HEAD_BYTES:-_PROOF_BYTES], self._came[-_PROOF_BYTES:]
        expected = self._endpoint.proof("caller", *self._nonces(), claim)
        if not hmac.compare_digest(proof, expected):
            raise _NotOurs
        self._claim = claim
        return True

    def judged(self, judge: Judge) -> dict[str, Any]:
        """The claim, once the caller was told that it is welcome; raises _Refused if it is not."""
        claim = _object(self._claim)
        if claim is None:
            raise _NotOurs
        refusal = judge(claim)
        verdict: dict[str, Any] = {}
        if refusal is not None:
            verdict = {"refused": str(refusal)[:_MOST_REASON], "again": refusal.again}
        text = json.dumps(verdict).encode()[:_MOST_VERDICT_BYTES]
        proof = self._endpoint.proof("listener", *self._nonces(), self._claim, text)
        self._send(_LENGTH.pack(len(text)) + text + proof)
        if refusal is not None:
            raise _Refused
        self.socket.setblocking(True)
        return claim

    def _nonces(self) -> tuple[bytes, bytes]:
        return self._nonce, self._came[len(_MAGIC) : _FIRST_BYTES]

    def _needed(self) -> int:
        if len(self._came) < _HEAD_BYTES:
            return _HEAD_BYTES
        (size,) = _LENGTH.unpack_from(self._came, _FIRST_BYTES)
        if size > MOST_CLAIM_BYTES:
            raise _NotOurs
        return _HEAD_BYTES + size + _PROOF_BYTES

    def _send(self, data: bytes) -> None:
        try:
            if self.socket.send(data) != len(data):
                raise _NotOurs
        except OSError as e:
            raise _NotOurs from e


def connect(
    address: tuple[str, int], endpoint: Endpoint, claim: Mapping[str, Any], timeout_secs: float = PROOF_SECS
) -> socket.socket:
    """A blocking socket to the listener of `endpoint`, both sides authenticated.

    Args:
      claim: who calls, as small JSON; timeout_secs: to connect, and again for the proof.

    Raises OSError if nobody listens, UnprovenError if who does is not of this job, ChannelRefusedError
    if this caller is not wanted.
    """
    text = json.dumps(dict(claim)).encode()
    if len(text) > MOST_CLAIM_BYTES:
        raise ValueError(f"a claim of {len(text)} bytes came; expected {MOST_CLAIM_BYTES} at most")
    connection = socket.create_connection(address, timeout=timeout_secs)
    try:
        _introduce(connection, endpoint, text, time.monotonic() + timeout_secs)
        connection.settimeout(None)
        return tuned(connection)
    except TimeoutError:
        connection.close()
        raise LateProofError(f"it did not prove within {timeout_secs:g} s that it is of this job") from None
    except BaseException:
        connection.close()
        raise


def _introduce(connection: socket.socket, endpoint: Endpoint, claim: bytes, until_secs: float) -> None:
    first = _exactly(connection, _FIRST_BYTES, until_secs, _MAGIC)
    nonces = first[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    proof = endpoint.proof("caller", *nonces, claim)
    connection.sendall(_MAGIC + nonces[1] + _LENGTH.pack(len(claim)) + claim + proof)
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until_secs))
    if size > _MOST_VERDICT_BYTES:
        raise UnprovenError("something else answers there")
    verdict = _exactly(connection, size, until_secs)
    proof = _exactly(connection, _PROOF_BYTES, until_secs)
    if not hmac.compare_digest(proof, endpoint.proof("listener", *nonces, claim, verdict)):
        raise UnprovenError("it does not know the secret of this job")
    said = _object(verdict)
    if said is None:
        raise UnprovenError("something else answers there")
    if "refused" in said:
        raise ChannelRefusedError(str(said["refused"]), again=said.get("again") is True)


def _exactly(connection: socket.socket, count: int, until_secs: float, begins: bytes = b"") -> bytes:
    """So many bytes, no more; UnprovenError as soon as they do not begin as they should."""
    came = b""
    while len(came) < count:
        left_secs = until_secs - time.monotonic()
        if left_secs <= 0:
            raise TimeoutError
        connection.settimeout(left_secs)
        data = connection.recv(count - len(came))
        if not data:
            raise UnprovenError(
                "it closed the connection; it may belong to another job, or have another secret "
                f"({SECRET_VARIABLE})"
            )
        came += data
        begun = came[: len(begins)]
        if begun != begins[: len(begun)]:
            raise UnprovenError("something else answers there")
    return came


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
