"""Heartbeats of a rank, and the detection of a silent rank 0."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from ctl.collectives.frames import Lost

PAUSE_SECS = 5.0  # a longer interval between two polls means that the process was stopped
_HEARTBEATS_PER_TIMEOUT = 4


class GroupFailedError(Exception):
    """Error after the loss of a rank or of the coordinator."""


class Heartbeats:
    """Heartbeats to rank 0, sent while this rank polls.

    Args:
      timeout_secs: Rank 0 is lost after this time without a message (seconds). 0 disables heartbeats.
      send: Sends a message to rank 0. Raises Lost if the connection has ended.
      parent: Rank at the other end of the connection, which relays the messages if it is not rank 0.

    Attributes:
      is_ending: True if rank 0 has left, so that it may be silent.
    """

    def __init__(self, timeout_secs: float, send: Callable[[dict[str, Any]], None], parent: int = 0):
        self._timeout_secs, self._send = timeout_secs, send
        self._source = f"rank {parent} or rank 0" if parent else "rank 0"
        self._last_received_at = self._last_sent_at = self._last_poll_at = time.monotonic()
        self.is_ending = False

    def record_message(self) -> None:
        """Records that rank 0 has sent a message."""
        self._last_received_at = time.monotonic()

    def poll(self) -> None:
        """Sends a heartbeat if it is due. Raises GroupFailedError if rank 0 is silent for too long."""
        limit_secs, now_secs = self._timeout_secs, time.monotonic()
        if now_secs - self._last_poll_at > PAUSE_SECS:  # this process was stopped; other ranks may be too
            self._last_received_at += now_secs - self._last_poll_at
        self._last_poll_at = now_secs
        if not limit_secs or now_secs - self._last_sent_at < limit_secs / _HEARTBEATS_PER_TIMEOUT:
            return
        self._last_sent_at = now_secs
        with contextlib.suppress(Lost):
            self._send({"type": "alive"})
        silent_secs = now_secs - self._last_received_at
        if silent_secs > limit_secs and not self.is_ending:
            raise GroupFailedError(f"{self._source} has been silent for {silent_secs:.0f} s.")
