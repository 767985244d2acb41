"""Connection of a rank to the coordinator on rank 0, in large groups through other ranks."""

import contextlib
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from ctl.collectives.frames import Channel, Lost
from ctl.collectives.heartbeats import GroupFailedError, Heartbeats
from ctl.collectives.outgoing import Outgoing
from ctl.collectives.settings import Settings

_ANSWER_SECS = 10.0  # additional time for rank 0 to report missing ranks
_REASON_SECS = 5.0  # time for rank 0 to answer the report of a lost rank


class CoordinatorLink:
    """Messages between this rank and rank 0. One thread reads them.

    Args:
      sock: Connection to rank 0 or to the parent.
      rank: This rank.
      settings: Timeouts.
      handle_message: Called for each message (header, payload) that concerns collectives.
      parent: Rank at the other end of the connection.

    Attributes:
      channel: Channel for messages to rank 0.
      outgoing: Requests of this rank.
      heartbeats: Heartbeats of this rank.
      parent: Rank at the other end of the connection.
      is_released: True if rank 0 has released this rank: no collective is pending.
    """

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        settings: Settings,
        handle_message: Callable[[dict[str, Any], bytes], None],
        parent: int = 0,
    ):
        self.channel = Channel(sock)
        self.outgoing = Outgoing(self.channel)
        self.heartbeats = Heartbeats(settings.heartbeat_timeout, self.channel.send, parent)
        self.is_released, self.parent = False, parent
        self._settings, self._handle_message = settings, handle_message
        self._shutdown_secs = settings.stall_shutdown if rank else 0.0
        self._waited_at = time.monotonic()

    def wait(self, wait_secs: Callable[[], float], first_request_at: Callable[[], float]) -> bool:
        """Waits for a message of rank 0, or for a request that this rank holds.

        Args:
          wait_secs: Returns the time limit of a poll (seconds).
          first_request_at: Returns `time.monotonic()` of the oldest pending request, or infinity.

        Returns:
          True for a message.

        Raises:
          GroupFailedError: If rank 0 is silent, or does not respond to a request within the stall limit.
        """
        poller = select.poll()
        control, outgoing = self.channel.socket.fileno(), self.outgoing
        for descriptor in (control, outgoing.descriptor):
            poller.register(descriptor, select.POLLIN)
        while True:
            events = dict(poller.poll(1000 * wait_secs()))
            if outgoing.descriptor in events:
                outgoing.acknowledge()
            if outgoing.has_queued and control not in events:  # further requests may join the batch
                time.sleep(self._settings.cycle)
                with contextlib.suppress(Lost):
                    outgoing.flush()
            self.heartbeats.poll()
            if control in events:
                return True
            silent_secs = time.monotonic() - max(self._waited_at, first_request_at())
            if self._shutdown_secs and silent_secs > self._shutdown_secs + _ANSWER_SECS:
                raise GroupFailedError(
                    f"rank 0 has not responded for {silent_secs:.0f} s ({self._settings.stall_name})."
                )
            if outgoing.has_held or outgoing.is_leaving:
                return False

    def restart_wait(self) -> None:
        """Restarts the time limit of rank 0, because this rank was busy."""
        self._waited_at = time.monotonic()

    def read(self) -> None:
        """Processes the available messages. Raises Lost if the connection has ended."""
        self.channel.inbox.read(self.channel.socket)
        self.heartbeats.record_message()
        self.restart_wait()
        for header, payload in self.channel.inbox.messages():
            message_type = header["type"]
            if message_type == "left":
                self.is_released = True
            elif message_type == "ending":
                self.heartbeats.is_ending = True
            elif message_type != "alive":
                self._handle_message(header, payload)

    def read_during_exchange(self) -> bool:
        """Like `read`, but returns False if rank 0 has disconnected after it, or this rank, has left."""
        try:
            self.read()
        except Lost:
            if not (self.heartbeats.is_ending or self.is_released):
                raise
            return False
        return True

    def wait_and_read(self, wait_secs: float) -> None:
        """Processes messages, and waits for them at most `wait_secs`. Raises Lost if rank 0 has left."""
        poller = select.poll()
        poller.register(self.channel.socket.fileno(), select.POLLIN)
        if poller.poll(1000 * wait_secs) and not self.read_during_exchange():
            raise Lost("it has left", 0)
        self.heartbeats.poll()

    def report(self, rank: int, error_message: str) -> str:
        """Reports a lost rank to rank 0, and waits for the reason that rank 0 sends to all ranks.

        The reason names another rank if an earlier loss has caused this one.

        Args:
          rank: The lost rank.
          error_message: The reason if rank 0 does not answer.

        Returns:
          The reason.
        """
        deadline = time.monotonic() + _REASON_SECS
        try:
            with contextlib.suppress(Lost):
                self.channel.send({"type": "broken", "rank": rank, "why": error_message})
                while time.monotonic() < deadline:
                    self.wait_and_read(_REASON_SECS / 10)
        except GroupFailedError as e:
            return str(e)
        return error_message

    def leave(self) -> None:
        """Notifies rank 0 that this rank leaves, after its requests."""
        with contextlib.suppress(Lost):
            self.outgoing.leave()

    def close(self) -> None:
        """Closes the connection. Call `channel.end` first, and wait until no thread reads from it."""
        self.channel.close()
        self.outgoing.close()
