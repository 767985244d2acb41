"""Periodic syncs of open files in mounted object stores, which otherwise show a file when it is closed."""

import contextlib
import time
from collections.abc import Callable

from ctl.io import paths

EVERY_SECS = 30.0  # a sync uploads the complete object


class Publishing:
    """Periodic sync of one open file in an object store. A no-op in other file systems.

    Args:
      every_secs: Minimum time between two syncs (seconds).
      clock: Function that returns the time (seconds).
    """

    def __init__(self, every_secs: float = EVERY_SECS, clock: Callable[[], float] = time.monotonic):
        self._every_secs = every_secs
        self._clock = clock
        self._synced_secs = clock()
        self._num_bytes = 0

    def after_flush(self, path: paths.AnyPath) -> None:
        """Syncs the file if the interval has passed. Called after a flush. Ignores errors."""
        time_secs = self._clock()
        if time_secs - self._synced_secs < self._every_secs:
            return
        self._synced_secs = time_secs
        if paths.has_rename(path):
            return
        with contextlib.suppress(OSError):
            num_bytes = path.stat().st_size
            if num_bytes != self._num_bytes:
                paths.sync(path)
            self._num_bytes = num_bytes
