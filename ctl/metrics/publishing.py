"""Periodic syncs of open files in mounted object stores, which otherwise show a file when it is closed."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

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

    def after_flush(self, file: IO, path: Path) -> None:
        """Syncs the file if the interval has passed. Called after `file.flush()`. Ignores errors."""
        time_secs = self._clock()
        if time_secs - self._synced_secs < self._every_secs:
            return
        self._synced_secs = time_secs
        size = os.fstat(file.fileno()).st_size
        if size != self._num_bytes and not paths.has_rename(path):
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
        self._num_bytes = size
