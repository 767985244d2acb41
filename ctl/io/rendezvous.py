"""Rendezvous of the processes of a job: one process listens, and its peers connect with retries.

    server = listening_socket(*split_address("host1:2222"))     # the listener; see authenticated_channel.py

    deadline = Deadline(600.0, remind_secs=3.0)                 # a caller
    caller = Caller(split_address("host1:2222"), endpoint, {"rank": 3}, pause_secs=0.2)
    while (connection := caller.call(deadline.remaining_secs)) is None and not deadline.is_over:
        caller.pause()

Used between the ranks of the engine (`ctl.collectives.bootstrap`), and between TensorFlow's workers and the
chief before TensorFlow starts (`ctl.distribute.startup_barrier`).
"""

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
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
    """Returns ("host1", 2222) for "host1:2222", and ("::1", 2222) for "[::1]:2222"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listening_socket(host: str, port: int, *, everywhere: bool = False) -> socket.socket:
    """Creates a socket that listens at a port of `host`, or of all addresses if `host` cannot be used.

    Debian and Ubuntu write `127.0.1.1 NAME` into /etc/hosts. The socket therefore listens at all addresses
    if a name resolves to a loopback address, unless it is `localhost` or a loopback address itself.

    Args:
      host: Name or address of this machine.
      port: The port; 0 for a free one.
      everywhere: If True, the socket also listens at all addresses for other names.

    Raises:
      OSError: For example if the port is in use.
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


def listener_sentence(listener: Listener, subject: str = "It") -> str:
    """Returns a sentence that names the address of a listener, with a space before it."""
    host, port = listener.address
    scope = " (all interfaces)" if host in ("0.0.0.0", "::") else ""
    if host.startswith("127.") or host == "::1":
        scope = ", which only this machine can reach"
    return f" {subject} listened at {host}:{port}{scope}."


def refusal_sentence(listener: Listener) -> str:
    """Returns a sentence about connections without a proof, with a space before it, or ""."""
    if not listener.refused:
        return ""
    return (
        f" {listener.refused} connections, the last from {listener.last_refused}, were refused because "
        "they did not prove that they belong to this job."
    )


class Deadline:
    """A timeout with reminders.

    Args:
      timeout_secs: Timeout (seconds).
      remind_secs: Time of the first reminder (seconds).
      has_backoff: If True, the interval doubles with each reminder.

    Attributes:
      timeout_secs: Timeout (seconds).
    """

    def __init__(self, timeout_secs: float, remind_secs: float, *, has_backoff: bool = True):
        self.timeout_secs = timeout_secs
        self._start = time.monotonic()
        self._interval_secs = remind_secs
        self._factor = 2 if has_backoff else 1
        self._remind_at = self._start + remind_secs

    @property
    def waited_secs(self) -> float:
        """Time since the start (seconds)."""
        return time.monotonic() - self._start

    @property
    def remaining_secs(self) -> float:
        """Time until the deadline (seconds), negative after it."""
        return self.timeout_secs - self.waited_secs

    @property
    def is_over(self) -> bool:
        """True after the deadline."""
        return self.remaining_secs <= 0

    def is_reminder_due(self) -> bool:
        """Returns True once for each reminder."""
        time_secs = time.monotonic()
        if time_secs < self._remind_at:
            return False
        self._interval_secs *= self._factor
        self._remind_at = time_secs + self._interval_secs
        return True


def growing_pauses(max_pause_secs: float, uniform: Callable[[], float]) -> Iterator[float]:
    """Yields the pauses between the calls of one process (seconds).

    They double up to the maximum. Processes that start at the same time and call the same listener have
    different pauses.

    Args:
      max_pause_secs: Maximum (seconds). The first pause is at most a sixteenth of it.
      uniform: Returns a random number from 0 to 1.
    """
    pause_secs = max_pause_secs / 16
    while True:
        yield pause_secs * (1 + uniform()) / 2
        pause_secs = min(2 * pause_secs, max_pause_secs)


class Caller:
    """A caller of a listener, with retries and backoff.

    Args:
      address: Host and port of the listener.
      endpoint: Endpoint of the listener.
      claim: Description of this process, as a small JSON object.
      pause_secs: Maximum pause between two calls (seconds).

    Attributes:
      failure: Reason of the latest failure, or None.
    """

    def __init__(
        self, address: tuple[str, int], endpoint: Endpoint, claim: Mapping[str, Any], *, pause_secs: float
    ):
        self.failure: str | None = None
        self._address = address
        self._endpoint = endpoint
        self._claim = claim
        self._max_pause_secs = pause_secs
        self._pauses = growing_pauses(pause_secs, random.SystemRandom().random)  # not the user's numbers

    def call(self, timeout_secs: float) -> socket.socket | None:
        """Connects once. Returns an authenticated connection, or None after a temporary failure.

        Args:
          timeout_secs: Timeout (seconds).

        Raises:
          ChannelRefusedError: If the listener refuses this process permanently.
        """
        try:
            timeout_secs = min(PROOF_SECS, max(timeout_secs, self._max_pause_secs))
            return connect(self._address, self._endpoint, self._claim, timeout_secs)
        except ChannelRefusedError as e:
            if not e.can_retry:
                raise
            self.failure = str(e)
        except LateProofError as e:  # an earlier reason is clearer than a short last timeout
            self.failure = self.failure or str(e)
        except OSError as e:
            self.failure = e.strerror or str(e)
        return None

    def pause(self) -> None:
        """Sleeps before the next call (`growing_pauses`)."""
        time.sleep(next(self._pauses))
