"""Connections between ranks after the start, for collectives that need more pairs of ranks.

All ranks of the collective call `LateLinks.connect`. Each one listens at the port of the start, or at a
free port if another program uses that one, and sends the port to rank 0, which sends the ports of all
ranks back. No port is open afterwards.
"""

import dataclasses
import socket
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ctl.collectives import bootstrap
from ctl.collectives.partners import are_connected_at_start, peers_of
from ctl.collectives.ranks import Ranks
from ctl.collectives.settings import Settings
from ctl.io.rendezvous import listening_socket, split_address

_Key = tuple[tuple[int, ...], bool]


class LateLinks:
    """The later connections of one rank.

    Args:
      ranks: Ranks of this process.
      settings: Timeouts and the secret of the job.
      send: Sends a message to rank 0.
      receive: Processes messages of rank 0, and waits for one at most the given time (seconds). Raises an
        error if a rank is lost.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        send: Callable[[dict[str, Any]], None],
        receive: Callable[[float], None],
    ):
        self._ranks, self._settings, self._send, self._receive = ranks, settings, send, receive
        self._ports: dict[_Key, list[int]] = {}
        self._ready: set[_Key] = set()

    def connect(
        self, members: Sequence[int], connected: Collection[int], *, all_pairs: bool
    ) -> dict[int, socket.socket]:
        """Connects the ranks that collectives of `members` need. All members call it. Blocks.

        Args:
          members: Participating ranks in order.
          connected: Ranks to which this rank has a connection.
          all_pairs: True for algorithms in which each rank exchanges with all others.

        Returns:
          Rank -> new connection.

        Raises:
          HorovodInternalError: If a rank does not connect within the time limit of the start.
          UsageError: If this process cannot open enough files.
        """
        key = tuple(members), all_pairs
        if key in self._ready:
            return {}
        sockets = {}
        if not are_connected_at_start(self._ranks.size, members, all_pairs=all_pairs):
            peers = peers_of(self._ranks.rank, members, all_pairs=all_pairs) - set(connected)
            sockets = self._connect(key, peers)
        self._ready.add(key)
        return sockets

    def receive_ports(self, header: dict[str, Any]) -> None:
        """Stores a message of rank 0 with the ports of the members."""
        self._ports[tuple(header["members"]), header["all_pairs"]] = header["ports"]

    def _connect(self, key: _Key, peers: set[int]) -> dict[int, socket.socket]:
        members, all_pairs = key
        with self._listen() as server:
            port = server.getsockname()[1]
            message = {"type": "listening", "members": list(members), "all_pairs": all_pairs, "port": port}
            self._send(message)
            while key not in self._ports:
                self._receive(1.0)
            addresses = list(self._ranks.addresses)
            for rank, port in zip(members, self._ports.pop(key), strict=True):
                addresses[rank] = f"{addresses[rank].rpartition(':')[0]}:{port}"
            ranks = dataclasses.replace(self._ranks, addresses=tuple(addresses))
            return bootstrap.connect_peers(ranks, self._settings, peers, self._poll, server)

    def _listen(self) -> socket.socket:
        host, port = split_address(self._ranks.addresses[self._ranks.rank])
        try:
            return listening_socket(host, port)  # a firewall may admit no other port
        except OSError:
            return listening_socket(host, 0)

    def _poll(self) -> str:
        self._receive(0.0)
        return ""


class PortExchange:
    """Ports of the members of groups, on rank 0, until all members have sent theirs."""

    def __init__(self) -> None:
        self._ports: dict[_Key, dict[int, int]] = {}

    def add(self, rank: int, header: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        """Stores the port of a rank. Returns the ranks and their messages after the last port."""
        members, all_pairs = header["members"], header["all_pairs"]
        key = tuple(members), all_pairs
        ports = self._ports.setdefault(key, {})
        ports[rank] = header["port"]
        if len(ports) < len(members):
            return []
        del self._ports[key]
        message = {
            "type": "ports",
            "members": members,
            "all_pairs": all_pairs,
            "ports": [ports[member] for member in members],
        }
        return [(member, message) for member in members]
