"""Limit of the handshakes that a listener handles at the same time.

Further callers wait in the queue of the listening socket until a handshake ends. A handshake that lasts
longer than `MIN_HANDSHAKE_SECS` gives its place to a waiting caller, so silent callers do not block the
port. All methods get the time from the caller, which may be a simulation.
"""

import resource
from collections.abc import Hashable
from typing import Generic, TypeVar

MIN_HANDSHAKE_SECS = 0.5

_MIN_LIMIT = 8
_Key = TypeVar("_Key", bound=Hashable)


class HandshakeLimit(Generic[_Key]):
    """The handshakes in progress and their maximum number.

    Args:
      max_handshakes: Maximum number. At most a quarter of the files that this process may open is used.
    """

    def __init__(self, max_handshakes: int):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max = max_handshakes if soft < 0 else max(_MIN_LIMIT, min(max_handshakes, soft // 4))
        self._started_at: dict[_Key, float] = {}  # oldest first
        self._is_paused = False

    def __len__(self) -> int:
        return len(self._started_at)

    def has_place(self, now_secs: float) -> bool:
        """Returns True if a further handshake may start, possibly instead of the oldest one."""
        return self._has_free_place() or self._is_overdue(now_secs, MIN_HANDSHAKE_SECS)

    def add(self, key: _Key, now_secs: float) -> _Key | None:
        """Adds a handshake if `has_place` is True. Returns the handshake that has to end, or None."""
        ended = None if self._has_free_place() else self.oldest
        self._started_at[key] = now_secs
        return ended

    def remove(self, key: _Key) -> None:
        """Removes a handshake that has ended."""
        del self._started_at[key]
        self._is_paused = False

    def pause(self) -> None:
        """Records that no file can be opened. There is no free place until a handshake ends."""
        self._is_paused = bool(self._started_at)

    @property
    def oldest(self) -> _Key:
        """The oldest handshake. There must be one."""
        return next(iter(self._started_at))

    def list_overdue(self, now_secs: float, timeout_secs: float) -> list[_Key]:
        """Returns the handshakes that started at least `timeout_secs` ago."""
        return [key for key, secs in self._started_at.items() if secs + timeout_secs <= now_secs]

    def _has_free_place(self) -> bool:
        return len(self._started_at) < self._max and not self._is_paused

    def _is_overdue(self, now_secs: float, timeout_secs: float) -> bool:
        return bool(self._started_at) and self._started_at[self.oldest] + timeout_secs <= now_secs
