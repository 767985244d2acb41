"""Messages of the coordinator for the ranks of a subtree. Equal ones for several ranks are sent once."""

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from ctl.collectives.frames import Outbox


class _Entry(NamedTuple):
    header: dict[str, Any]
    payload: bytes
    ranks: list[int]


class GroupOutbox:
    """Queue of messages for the ranks of a subtree, sent to its root."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._entries: list[_Entry] = []
        self._newest: dict[int, int] = {}  # rank -> index of its newest entry

    def __bool__(self) -> bool:
        return bool(self._entries or self._outbox)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that the socket has accepted."""
        return self._outbox.bytes_sent

    def put(self, rank: int, header: dict[str, Any], payload: Sequence[Any]) -> None:
        """Adds a message for one rank. Its messages keep their order."""
        data = b"".join(bytes(memoryview(part).cast("B")) for part in payload if len(part))
        index = self._newest.get(rank, -1) + 1
        entry = self._entries[index] if index < len(self._entries) else None
        if entry is not None and entry.header == header and entry.payload == data:
            entry.ranks.append(rank)
        else:
            index = len(self._entries)
            self._entries.append(_Entry(header, data, [rank]))
        self._newest[rank] = index

    def write(self, sock: socket.socket) -> None:
        """Sends queued bytes until the socket would block. Raises Lost if the connection has ended."""
        for header, payload, ranks in self._entries:
            self._outbox.put({"type": "to", "ranks": ranks, "header": header}, payload)
        self._entries, self._newest = [], {}
        self._outbox.write(sock)


class MemberOutbox:
    """Outbox of one rank in a subtree, with the interface of `Outbox`.

    Args:
      group: Queue of the subtree.
      rank: The rank.
      is_root: True if this outbox counts the bytes of the group.
    """

    def __init__(self, group: GroupOutbox, rank: int, *, is_root: bool):
        self._group, self._rank, self._is_root = group, rank, is_root

    def __bool__(self) -> bool:
        return bool(self._group)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes of the group, or 0 if this rank is not its root."""
        return self._group.bytes_sent if self._is_root else 0

    def put(self, header: dict[str, Any], *payload: Any) -> None:
        """Adds a message to the queue."""
        self._group.put(self._rank, header, payload)

    def write(self, sock: socket.socket) -> None:
        """Sends the queue of the subtree."""
        self._group.write(sock)
