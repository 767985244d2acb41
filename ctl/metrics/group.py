"""Tells several writers; one that fails is named once and left out from then on."""

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from ctl.metrics.protocol import Event, MetricWriter

_log = logging.getLogger("ctl")


class WriterGroup:
    """Writers as one; on processes other than the chief, those that want to hear everywhere."""

    def __init__(self, writers: Iterable[MetricWriter]):
        self._writers = list(writers)
        self._lock = threading.RLock()  # a save in the background is told from its own thread

    def __bool__(self) -> bool:
        return bool(self._writers)

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        self._each(lambda writer: writer.write(step, values, run))

    def note(self, event: Event) -> None:
        if self._writers:
            self._each(lambda writer: writer.note(event))

    def _each(self, call: Any) -> None:
        with self._lock:
            for writer in list(self._writers):
                try:
                    call(writer)
                except Exception as e:
                    self._writers.remove(writer)
                    _log.warning(
                        "%s failed and is left out from now on: %s: %s",
                        type(writer).__name__,
                        type(e).__name__,
                        e,
                    )
