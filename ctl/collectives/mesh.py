"""Exchange of large tensors: each rank sends to one rank while it receives from another."""

import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from ctl.collectives.frames import Lost
from ctl.collectives.late_links import LateLinks
from ctl.collectives.settings import Settings
from ctl.collectives.transports.link import Consume, Link, connect_links
from ctl.collectives.transports.registry import create_transport

_WAKE_SECS = 1.0
_MIN_POLLS = 10  # before this thread sleeps during a small exchange, because it wakes up late
_MAX_POLLED_BYTES = 1 << 17  # limit of a small exchange
_SPINS = 200  # polls without progress before this process sleeps between polls
_PAUSE_SECS = 1e-4


class Mesh:
    """Links to the other ranks, used by one thread at a time.

    Args:
      rank: Rank of this process.
      peers: Rank -> connected socket.
      control: Socket that is also polled during an exchange.
      receive_control: Reads `control`. Raises an error to end the exchange. Returns False if the connection
        has ended.
      on_poll: Called after each poll.
      settings: Timeouts of an exchange without progress.
      late_links: Connects further ranks. None: `peers` are all other ranks.
      machine_by_rank: Like `Ranks.machine_by_rank`. Empty: all ranks are on one machine.

    Attributes:
      bytes_sent: Bytes sent to other ranks, over sockets or shared memory.
      last_transfer_at: `time.monotonic()` of the last transfer.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        control: socket.socket,
        receive_control: Callable[[], bool],
        on_poll: Callable[[], None],
        settings: Settings,
        late_links: LateLinks | None = None,
        machine_by_rank: tuple[int, ...] = (),
    ):
        self.machine_by_rank = machine_by_rank
        self._rank, self._late_links = rank, late_links
        self._control: socket.socket | None = control
        self._receive_control = receive_control
        self._on_poll = on_poll
        self._settings = settings
        self.bytes_sent, self.last_transfer_at = 0, time.monotonic()
        self._transport = create_transport(settings.transport)
        self._links = connect_links(self._transport, rank, peers)

    @property
    def paths(self) -> dict[int, str]:
        """Data path by rank: "memory", "tcp" or "mpi"."""
        return {rank: link.path for rank, link in self._links.items()}

    @property
    def sockets(self) -> list[socket.socket]:
        """Connections to the other ranks."""
        return [link.socket for link in self._links.values()]

    def require_links(self, members: Sequence[int], *, all_pairs: bool = False) -> None:
        """Creates the links that this rank lacks for collectives of `members`. All members call it.

        Args:
          members: Participating ranks in order.
          all_pairs: True for algorithms in which each rank exchanges with all others.
        """
        if self._late_links is not None:
            sockets = self._late_links.connect(members, self._links.keys(), all_pairs=all_pairs)
            if sockets:
                self._links |= connect_links(self._transport, self._rank, sockets)

    def exchange(
        self,
        destination: int,
        arrays: Sequence[np.ndarray],
        source: int,
        size: int,
        target: np.ndarray | None = None,
        consume: Consume | None = None,
    ) -> None:
        """Sends arrays to one rank and receives from another. Blocks until both messages are complete.

        Args:
          destination: Rank to send to.
          arrays: The message is their concatenation.
          source: Rank to receive from.
          size: Size of the received message (bytes). The sender specifies the same size.
          target: Array for the received bytes, or None.
          consume: Function that gets the received bytes in chunks, or None.

        Raises:
          Lost: If a connection ends or stalls. The second argument is the rank.
        """
        sender, receiver = self._links[destination], self._links[source]
        receiver.receive(size, target, consume)
        sender.send(arrays)
        self.bytes_sent += sum(array.nbytes for array in arrays)
        links = {sender, receiver}
        is_polled = any(link.needs_polling for link in links)
        self.last_transfer_at = warned_at = time.monotonic()
        num_idle_polls = 0
        min_polls = _MIN_POLLS if size <= _MAX_POLLED_BYTES else 0
        while not (sender.is_sent and receiver.is_received):
            poller = self._poller(links)
            initial_needs = {k: (k.needs_read, k.needs_write) for k in links}
            while initial_needs == {k: (k.needs_read, k.needs_write) for k in links}:
                waits = not is_polled and num_idle_polls >= min_polls
                is_idle = not self._transfer(links, poller, _WAKE_SECS if waits else 0.0)
                num_idle_polls = num_idle_polls + 1 if is_idle else 0
                if is_idle and (waits or is_polled):
                    warned_at = self._check_stall(
                        warned_at, destination if receiver.is_received else source
                    )
                if is_polled:
                    time.sleep(0.0 if num_idle_polls < _SPINS else _PAUSE_SECS)

    def _transfer(self, links: set[Link], poller: select.poll, wait_secs: float) -> bool:
        """Waits for events and processes them. Returns False if there was none."""
        polled_links = [link for link in links if link.needs_polling]
        has_progress = sum(link.poll() for link in polled_links) > 0  # calls `poll` of each link
        events_by_descriptor = dict(poller.poll(1000 * wait_secs))
        self._on_poll()
        control = -1 if self._control is None else self._control.fileno()
        if control in events_by_descriptor and not self._receive_control():
            poller.unregister(control)
            self._control = None
        for link in links:
            events = events_by_descriptor.get(link.socket.fileno(), 0)
            if events & ~select.POLLOUT and link.needs_read:
                link.read()
            if events & ~select.POLLIN and link.needs_write:
                link.write()
        if has_progress or events_by_descriptor.keys() - {control}:
            self.last_transfer_at = time.monotonic()
        return has_progress or bool(events_by_descriptor)

    def _poller(self, links: set[Link]) -> select.poll:
        """Returns a poller of `links` and `control`. `select.select` is limited to 1024 descriptors."""
        poller = select.poll()
        if self._control is not None:
            poller.register(self._control.fileno(), select.POLLIN)
        for link in links:
            events = select.POLLIN * link.needs_read | select.POLLOUT * link.needs_write
            if events:
                poller.register(link.socket.fileno(), events)
        return poller

    def record_failure(self) -> None:
        """Records that a rank was lost, for the end of the process."""
        self._transport.record_failure()

    def close(self) -> None:
        """Closes all connections."""
        for link in self._links.values():
            link.close()

    def _check_stall(self, warned_at: float, rank: int) -> float:
        """Logs a warning or raises Lost after a timeout. Returns the time of the last warning."""
        now_secs, last_transfer_at, settings = time.monotonic(), self.last_transfer_at, self._settings
        if settings.stall_shutdown and now_secs - last_transfer_at > settings.stall_shutdown:
            raise Lost(
                f"no data was exchanged with it for {now_secs - last_transfer_at:.0f} s during a "
                f"collective; {settings.stall_name}",
                rank,
            )
        if settings.stall_warning and now_secs - max(last_transfer_at, warned_at) > settings.stall_warning:
            print(
                f"hvd: no data was exchanged with rank {rank} for {now_secs - last_transfer_at:.0f} s "
                "during a collective",
                file=sys.stderr,
                flush=True,
            )
            return now_secs
        return warned_at
