"""How the processes of a job meet: one listens at an address that all know, others call until it answers.

    server = listening(*split_address("host1:2222"))        # who listens; see authenticated_channel.py

    deadline = Deadline(600.0, remind_secs=3.0)             # who calls
    caller = Caller(split_address("host1:2222"), endpoint, {"rank": 3}, pause_secs=0.2)
    while (connection := caller.call(deadline.left_secs)) is None and not deadline.is_over:
        caller.pause()

The ranks of the engine meet so, each with every other (`ctl.collectives.bootstrap`), and TensorFlow's
workers before it starts, each with the chief (`ctl.distribute.startup_barrier`).
"""

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from ctl.io.authenticated_channel import (
    PROOF_SECS,
    ChannelRefusedError,
    Endpoint,
    LateProofError,
    Listener,
    connect,
)

BACKLOG = 4096


def split_address(address: str) -> tuple[str, int]:
    """ "host1:2222" -> ("host1", 2222); "[::1]:2222" -> ("::1", 2222)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listening(host: str, port: int, *, everywhere: bool = False) -> socket.socket:
    """Returns a socket that listens at a port of this host, or at all its addresses if none has that name.

    Debian and Ubuntu write `127.0.1.1 NAME` into /etc/hosts. A name that resolves to a loopback address
    therefore means all addresses, unless it is `localhost` or a loopback address itself.

    Args:
      everywhere: Listen at all addresses for any other name, too.

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    if is_loopback or not (everywhere or _resolves_to_loopback(host)):
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError:
            if is_loopback:
                raise
    return socket.create_server(("", port), family=family, backlog=BACKLOG)


def _resolves_to_loopback(host: str) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
        return any(str(address).startswith("127.") or address == "::1" for address in addresses)
    return False


def listening_place(listener: Listener, subject: str = "It") -> str:
    """Returns a sentence that names the address of a listener, with a space before it."""
    host, port = listener.address
    scope = " (all interfaces)" if host in ("0.0.0.0", "::") else ""
    if host.startswith("127.") or host == "::1":
        scope = ", which only this machine can reach"
    return f" {subject} listened at {host}:{port}{scope}."


def refusals(listener: Listener) -> str:
    """A sentence on connections without a proof, with a space before it; "" if there was none."""
    if not listener.refused:
        return ""
    return (
        f" {listener.refused} connections, the last from {listener.last_refused}, were refused: they did "
        "not prove that they are of this job."
    )


class Deadline:
    """How long somebody is waited for, and when it is time to say so.

    Attributes:
      timeout_secs: in all.
    """

    def __init__(self, timeout_secs: float, remind_secs: float, *, ever_more_rarely: bool = True):
        self.timeout_secs = timeout_secs
        self._start = time.monotonic()
        self._every_secs = remind_secs
        self._factor = 2 if ever_more_rarely else 1
        self._remind_at = self._start + remind_secs

    @property
    def waited_secs(self) -> float:
        return time.monotonic() - self._start

    @property
    def left_secs(self) -> float:
        return self.timeout_secs - self.waited_secs

    @property
    def is_over(self) -> bool:
        return self.left_secs <= 0

    def is_due(self) -> bool:
        """True once for each reminder."""
        now = time.monotonic()
        if now < self._remind_at:
            return False
        self._every_secs *= self._factor
        self._remind_at = now + self._every_secs
        return True


class Caller:
    """Calls a listener of the job again and again, at first in quick succession.

    Attributes:
      why: what came of the newest call that came to nothing; None before.
    """

    def __init__(
        self, address: tuple[str, int], endpoint: Endpoint, claim: Mapping[str, Any], *, pause_secs: float
    ):
        self.why: str | None = None
        self._address = address
        self._endpoint = endpoint
        self._claim = claim
        self._most_secs = pause_secs
        self._pause_secs = pause_secs / 16  # all processes start at the same time

    def call(self, left_secs: float) -> socket.socket | None:
        """One call, of at most that time: an authenticated connection, or None.

        Raises ChannelRefusedError if this process is not wanted, and will not be.
        """
        try:
            timeout_secs = min(PROOF_SECS, max(left_secs, self._most_secs))
            return connect(self._address, self._endpoint, self._claim, timeout_secs)
        except ChannelRefusedError as e:
            if not e.again:
                raise
            self.why = str(e)
        except LateProofError as e:  # the last call may be a short one
            self.why = self.why or str(e)
        except OSError as e:
            self.why = e.strerror or str(e)
        return None

    def pause(self) -> None:
        """Between two calls."""
        time.sleep(self._pause_secs)
        self._pause_secs = min(2 * self._pause_secs, self._most_secs)
