"""Lines of JSON between the launcher and its processes, after both have shown that they know the secret.

    line = call(("host1", 40213), secret, {"worker": 3})       # a process
    line, hello = answer(accepted_socket, secret)              # the launcher
    line.send({"join": "host1:40214"})
    line.receive()                      -> a dict; None when the other end is gone

The secret never travels: each end proves it with an HMAC over random numbers of both. What is not proven
within ten seconds, or is no JSON object, ends the connection.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import threading

_GREETING_SECS = 10.0
_GREETING_BYTES = 4096
_LINE_BYTES = 2**20


class RefusedLine(ConnectionError):
    """The other end does not know the secret, or does not speak as expected."""


class Line:
    """One connection; `send` may be called from several threads, `receive` from one."""

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._rest = b""
        self._lock = threading.Lock()
        self.most_bytes = _GREETING_BYTES

    def send(self, message: dict) -> bool:
        """Sends; False when the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(data)
            return True
        return False

    def receive(self) -> dict | None:
        """The next message; None at the end of the connection, or of sense."""
        while b"\n" not in self._rest:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data or len(self._rest) > self.most_bytes:
                return None
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def trust(self) -> "Line":
        """From now on messages may be long, and late."""
        self.most_bytes = _LINE_BYTES
        self._socket.settimeout(None)
        return self

    def close(self) -> None:
        """Ends the connection; a `receive` that waits returns None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def call(address: tuple[str, int], secret: str, hello: dict) -> Line:
    """Connects and says hello; OSError when nobody is there, RefusedLine for a stranger."""
    connected = socket.create_connection(address, timeout=_GREETING_SECS)
    line = Line(connected)
    theirs = _word(line.receive(), "nonce")
    ours = secrets.token_hex(16)
    proof = _proof(secret, "worker", theirs, ours, json.dumps(hello))
    line.send({"nonce": ours, "hello": hello, "proof": proof})
    answer = _word(line.receive(), "proof")
    if not hmac.compare_digest(answer, _proof(secret, "launcher", ours, theirs)):
        line.close()
        raise RefusedLine(
            f"who listens at {address[0]}:{address[1]} is not the launcher of this job"
        )
    _keep_alive(connected)
    return line.trust()


def answer(accepted: socket.socket, secret: str) -> tuple[Line, dict]:
    """Greets who has called; RefusedLine for a stranger."""
    accepted.settimeout(_GREETING_SECS)
    line = Line(accepted)
    ours = secrets.token_hex(16)
    line.send({"nonce": ours})
    came = line.receive()
    theirs, proof = _word(came, "nonce"), _word(came, "proof")
    hello = came.get("hello") if came else None
    expected = _proof(secret, "worker", ours, theirs, json.dumps(hello))
    if not isinstance(hello, dict) or not hmac.compare_digest(proof, expected):
        line.close()
        raise RefusedLine("a stranger called")
    line.send({"proof": _proof(secret, "launcher", theirs, ours)})
    _keep_alive(accepted)
    return line.trust(), hello


def _keep_alive(connected: socket.socket) -> None:
    """A machine that vanished without a word is noticed after two minutes or so."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _word(message: dict | None, key: str) -> str:
    value = message.get(key) if message else None
    if not isinstance(value, str) or not value.isascii():
        raise RefusedLine("the other end does not speak as expected")
    return value


def _proof(secret: str, *words: str) -> str:
    return hmac.new(secret.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()
