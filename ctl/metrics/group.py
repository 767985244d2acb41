"""Calls of several metric writers. A writer that raises an error is removed with a warning."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ctl.errors import LeaseLostError
from ctl.metrics.adapter import MetricWriterLike, as_writers
from ctl.metrics.protocol import Ended, Event

_log = logging.getLogger("ctl")


class WriterGroup:
    """The metric writers of one process, called as one."""

    def __init__(self, writers: Iterable[MetricWriterLike], check: Callable[[], None] | None = None):
        """Stores the writers.

        Args:
          writers: The metric writers.
          check: Called before each write; raises LeaseLostError if another job has taken over model_dir.
            `MetricWriter.abandon` is then called.
        """
        self._writers = as_writers(writers)
        self._check = check or (lambda: None)
        self._lock = threading.RLock()  # background saves send events from their own thread

    def __bool__(self) -> bool:
        return bool(self._writers)

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Writes metrics with all writers. A writer that fails gets no further calls."""
        self._check_owner()
        self._each(lambda writer: writer.write(step, values, run))

    def note(self, event: Event) -> None:
        """Sends an event to all writers; raises LeaseLostError, but not for the end of the run."""
        try:
            self._check_owner()
        except LeaseLostError:
            if not isinstance(event, Ended):
                raise
        if self._writers:
            self._each(lambda writer: writer.note(event))

    def _check_owner(self) -> None:
        try:
            self._check()
        except LeaseLostError:
            with self._lock:
                self._writers = [writer for writer in self._writers if not writer.abandon()]
            raise

    def _each(self, call: Any) -> None:
        with self._lock:
            for writer in list(self._writers):
                try:
                    call(writer)
                except Exception as e:
                    self._writers.remove(writer)
                    _log.warning(
                        "%s failed and is not called again: %s: %s",
                        writer.class_name,
                        type(e).__name__,
                        e,
                    )
