"""Authenticated connections between the processes of one job, which share a secret.

    endpoint = Endpoint(secret, "elastic", "launcher")

    listener = Listener(server_socket, endpoint, judge)                  # the listener
    for connection, claim in listener.accept_callers(wait_secs=0.2): ...

    connection = connect(("host1", 40213), endpoint, {"worker": 3})      # the caller

The protocol, with fixed roles and a random nonce of each side:

    listener -> caller   magic, listener's nonce
    caller -> listener   magic, caller's nonce, length, claim (JSON), HMAC("caller", claim)
    listener -> caller   length, verdict (JSON), HMAC("listener", claim, verdict)

Each HMAC-SHA256 also covers the purpose of the port, the listener's identity and both nonces. Therefore a
message cannot be reflected to its sender, replayed, or used at another port. The secret is never sent. The
claim of a caller is not parsed before its proof. The proof is limited to `PROOF_SECS` and some hundred
bytes. Data after the proof is neither encrypted nor signed. Without a secret (b"") the limits apply, but
callers are not authenticated.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ctl.io.handshake_limit import MIN_HANDSHAKE_SECS, HandshakeLimit
from ctl.io.tcp_options import set_tcp_options

SECRET_VARIABLE = "CTL_HVD_SECRET"
PROOF_SECS = 5.0
MAX_CLAIM_BYTES = 512
MAX_PENDING_CALLERS = 256
MAX_ACCEPTS = 64  # in one call of `Listener.accept_callers`

_MAGIC = b"ctl-1\r\n\0"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct(">H")
_FIRST_BYTES = len(_MAGIC) + _NONCE_BYTES
_HEAD_BYTES = _FIRST_BYTES + _LENGTH.size
_MAX_VERDICT_BYTES = 2048
_MAX_REASON_LENGTH = 400  # characters
_FULL_SECS = 0.05  # pause when no file descriptor is free


class ChannelError(ConnectionError):
    """Error of a connection before it is authenticated."""


class UnprovenError(ChannelError):
    """Error for a listener that has not proved that it belongs to this job."""


class LateProofError(UnprovenError):
    """Error for a listener that has not sent its proof in time."""


class ChannelRefusedError(ChannelError):
    """Error for a caller that the listener refuses.

    Attributes:
      can_retry: True if the listener may accept the caller later.
    """

    def __init__(self, reason: str, *, can_retry: bool = False):
        super().__init__(reason)
        self.can_retry = can_retry


@dataclass(frozen=True)
class Endpoint:
    """Description of a port, equal on both sides of a connection.

    Attributes:
      secret: Secret of the job; b"" without one.
      purpose: "startup", "ranks", ... A proof for one purpose is not valid for another.
      identity: Name of the listener, such as "rank 0".
    """

    secret: bytes = field(repr=False)
    purpose: str
    identity: str

    def proof(self, role: str, *parts: bytes) -> bytes:
        """Returns the HMAC (32 bytes) of the parts for a role, "caller" or "listener"."""
        mac = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (role.encode(), self.purpose.encode(), self.identity.encode(), *parts):
            mac.update(len(part).to_bytes(4, "big") + part)
        return mac.digest()


Judge = Callable[[dict[str, Any]], ChannelRefusedError | None]


def job_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Returns the secret that the launcher has set for this process; b"" without a launcher."""
    return environ.get(SECRET_VARIABLE, "").encode()


class Listener:
    """A listener that authenticates callers concurrently. Not thread-safe.

    Each caller must authenticate within `PROOF_SECS`. At most `MAX_PENDING_CALLERS` do so at the same time
    (`handshake_limit.py`); further callers wait in the kernel's queue of this socket.

    Args:
      server: A listening socket, which this object closes.
      endpoint: Description of the port.
      judge: Claim of an authenticated caller -> None to accept it, or the reason to refuse it.

    Attributes:
      refused: Number of connections that were closed without a proof.
      last_refused: Address of the most recent of these connections.
    """

    def __init__(self, server: socket.socket, endpoint: Endpoint, judge: Judge = lambda claim: None):
        self.refused = 0
        self.last_refused = ""
        self._server = server
        self._endpoint = endpoint
        self._judge = judge
        self._pending: dict[socket.socket, _PendingCaller] = {}
        self._limit: HandshakeLimit[socket.socket] = HandshakeLimit(MAX_PENDING_CALLERS)
        self._selector = selectors.DefaultSelector()
        self._is_polled = False  # the listening socket
        server.setblocking(False)
        self._poll_server()

    @property
    def address(self) -> tuple[str, int]:
        """IP address and port of the listening socket."""
        return self._server.getsockname()[:2]

    def accept_callers(self, wait_secs: float = 0.0) -> list[tuple[socket.socket, dict[str, Any]]]:
        """Returns the blocking socket and the claim of each newly authenticated caller.

        Args:
          wait_secs: Maximum time to wait for data (seconds).
        """
        accepted = []
        self._poll_server()
        wait_secs = wait_secs if self._is_polled else min(wait_secs, MIN_HANDSHAKE_SECS)
        for key, _ in self._selector.select(wait_secs):
            if key.fileobj is self._server:
                self._accept()
                continue
            caller = self._pending.get(key.fileobj)  # type: ignore[call-overload]
            if caller is None:
                continue
            try:
                if caller.has_proven():
                    claim = caller.send_verdict(self._judge)
                    self._release(caller.socket)
                    accepted.append((set_tcp_options(caller.socket), claim))
            except _RefusalSentError:
                self._release(caller.socket)
                caller.socket.close()  # without a reset, which could discard the verdict
            except _UnauthenticatedError:
                self._drop(caller.socket)
        for connection in self._limit.list_overdue(time.monotonic(), PROOF_SECS):
            self._drop(connection)
        self._poll_server()
        return accepted

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `accept_callers` has data to process."""
        return self._selector.fileno()

    def close(self) -> None:
        """Closes the listening socket and the connections that are not authenticated."""
        for connection in list(self._pending):
            self._drop(connection)
        self._selector.close()
        self._server.close()

    def _poll_server(self) -> None:
        """Polls the listening socket while a further handshake may start."""
        has_place = self._limit.has_place(time.monotonic())
        if has_place and not self._is_polled:
            self._selector.register(self._server, selectors.EVENT_READ)
        elif self._is_polled and not has_place:
            self._selector.unregister(self._server)
        self._is_polled = has_place

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            now_secs = time.monotonic()
            if not self._limit.has_place(now_secs):
                return
            try:
                connection, address = self._server.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # no file descriptor is free
                overdue = self._limit.list_overdue(now_secs, MIN_HANDSHAKE_SECS)
                if overdue:
                    self._drop(overdue[0])
                elif self._pending:
                    self._limit.pause()
                else:
                    time.sleep(_FULL_SECS)
                return
            replaced = self._limit.add(connection, now_secs)
            if replaced is not None:
                self._drop(replaced)
            caller = _PendingCaller(connection, str(address[0]), self._endpoint)
            self._pending[connection] = caller
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                caller.greet()
            except _UnauthenticatedError:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self.refused += 1
        self.last_refused = self._pending[connection].address
        self._release(connection)
        with contextlib.suppress(OSError):  # a reset, which leaves no TIME_WAIT state in the kernel
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def _release(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._limit.remove(connection)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection)


class _UnauthenticatedError(Exception):
    """Error for a caller that cannot be authenticated."""


class _RefusalSentError(Exception):
    """Error for an authenticated caller to which a refusal was sent."""


class _PendingCaller:
    """A caller that is not yet authenticated."""

    def __init__(self, connection: socket.socket, address: str, endpoint: Endpoint):
        self.socket = connection
        self.address = address
        self._endpoint = endpoint
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._received = b""
        self._claim = b""
        connection.setblocking(False)

    def greet(self) -> None:
        self._send(_MAGIC + self._nonce)

    def has_proven(self) -> bool:
        """Reads available data. Returns True after a valid proof, raises an error for invalid data."""
        while (missing := self._num_needed_bytes() - len(self._received)) > 0:
            try:
                data = self.socket.recv(missing)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as e:
                raise _UnauthenticatedError from e
            self._received += data
            start = self._received[: len(_MAGIC)]
            if not data or start != _MAGIC[: len(start)]:
                raise _UnauthenticatedError
        claim, proof = self._received[_HEAD_BYTES:-_PROOF_BYTES], self._received[-_PROOF_BYTES:]
        expected = self._endpoint.proof("caller", *self._nonces(), claim)
        if not hmac.compare_digest(proof, expected):
            raise _UnauthenticatedError
        self._claim = claim
        return True

    def send_verdict(self, judge: Judge) -> dict[str, Any]:
        """Sends the verdict and returns the claim. Raises _RefusalSentError if the verdict is a refusal."""
        claim = _parse_object(self._claim)
        if claim is None:
            raise _UnauthenticatedError
        refusal = judge(claim)
        verdict: dict[str, Any] = {}
        if refusal is not None:
            verdict = {"refused": str(refusal)[:_MAX_REASON_LENGTH], "again": refusal.can_retry}
        text = json.dumps(verdict).encode()[:_MAX_VERDICT_BYTES]
        proof = self._endpoint.proof("listener", *self._nonces(), self._claim, text)
        self._send(_LENGTH.pack(len(text)) + text + proof)
        if refusal is not None:
            raise _RefusalSentError
        self.socket.setblocking(True)
        return claim

    def _nonces(self) -> tuple[bytes, bytes]:
        return self._nonce, self._received[len(_MAGIC) : _FIRST_BYTES]

    def _num_needed_bytes(self) -> int:
        if len(self._received) < _HEAD_BYTES:
            return _HEAD_BYTES
        (size,) = _LENGTH.unpack_from(self._received, _FIRST_BYTES)
        if size > MAX_CLAIM_BYTES:
            raise _UnauthenticatedError
        return _HEAD_BYTES + size + _PROOF_BYTES

    def _send(self, data: bytes) -> None:
        try:
            if self.socket.send(data) != len(data):
                raise _UnauthenticatedError
        except OSError as e:
            raise _UnauthenticatedError from e


def connect(
    address: tuple[str, int], endpoint: Endpoint, claim: Mapping[str, Any], timeout_secs: float = PROOF_SECS
) -> socket.socket:
    """Connects to the listener of an endpoint and authenticates both sides.

    Args:
      address: Host and port.
      endpoint: Description of the port.
      claim: Description of this process, as a small JSON object.
      timeout_secs: Timeout of the connection, and of the proof (seconds).

    Returns:
      A blocking socket.

    Raises:
      OSError: If the connection fails.
      UnprovenError: If the listener does not belong to this job.
      ChannelRefusedError: If the listener refuses this caller.
    """
    text = json.dumps(dict(claim)).encode()
    if len(text) > MAX_CLAIM_BYTES:
        raise ValueError(f"the claim has {len(text)} bytes; expected at most {MAX_CLAIM_BYTES}")
    connection = socket.create_connection(address, timeout=timeout_secs)
    try:
        _authenticate(connection, endpoint, text, time.monotonic() + timeout_secs)
        connection.settimeout(None)
        return set_tcp_options(connection)
    except TimeoutError:
        connection.close()
        message = f"it did not prove within {timeout_secs:g} s that it belongs to this job"
        raise LateProofError(message) from None
    except BaseException:
        connection.close()
        raise


def _authenticate(connection: socket.socket, endpoint: Endpoint, claim: bytes, deadline: float) -> None:
    first = _receive_exactly(connection, _FIRST_BYTES, deadline, _MAGIC)
    nonces = first[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    proof = endpoint.proof("caller", *nonces, claim)
    connection.sendall(_MAGIC + nonces[1] + _LENGTH.pack(len(claim)) + claim + proof)
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, deadline))
    if size > _MAX_VERDICT_BYTES:
        raise UnprovenError("another program listens on this port")
    verdict = _receive_exactly(connection, size, deadline)
    proof = _receive_exactly(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, endpoint.proof("listener", *nonces, claim, verdict)):
        raise UnprovenError(f"its secret is not that of this job ({SECRET_VARIABLE})")
    content = _parse_object(verdict)
    if content is None:
        raise UnprovenError("another program listens on this port")
    if "refused" in content:
        raise ChannelRefusedError(str(content["refused"]), can_retry=content.get("again") is True)


def _receive_exactly(connection: socket.socket, count: int, deadline: float, prefix: bytes = b"") -> bytes:
    """Receives `count` bytes. Raises UnprovenError if they do not start with `prefix`."""
    received = b""
    while len(received) < count:
        remaining_secs = deadline - time.monotonic()
        if remaining_secs <= 0:
            raise TimeoutError
        connection.settimeout(remaining_secs)
        data = connection.recv(count - len(received))
        if not data:
            raise UnprovenError(
                "it closed the connection; it may belong to another job, or have a different secret "
                f"({SECRET_VARIABLE})"
            )
        received += data
        start = received[: len(prefix)]
        if start != prefix[: len(start)]:
            raise UnprovenError("another program listens on this port")
    return received


def _parse_object(text: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
