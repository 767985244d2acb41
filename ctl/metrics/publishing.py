"""Files that grow for hours in a mounted object store: others see what was synced or closed."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ctl.io import paths

EVERY_SECS = 30.0  # each time the whole object is written anew


class Publishing:
    """Syncs an open file now and then, if it is in an object store; does nothing elsewhere."""

    def __init__(self, every_secs: float = EVERY_SECS, clock: Callable[[], float] = time.monotonic):
        self._every_secs = every_secs
        self._clock = clock
        self._synced_secs = clock()
        self._bytes = 0

    def flushed(self, file: IO, path: Path) -> None:
        """To be called after `file.flush()`; a store that refuses is borne."""
        now = self._clock()
        if now - self._synced_secs < self._every_secs:
            return
        self._synced_secs = now
        size = os.fstat(file.fileno()).st_size
        if size != self._bytes and not paths.has_rename(path):
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
        self._bytes = size
