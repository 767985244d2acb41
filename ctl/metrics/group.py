"""Tells several writers; one that fails is named once and left out from then on."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ctl.errors import LeaseLostError
from ctl.metrics.protocol import Ended, Event, MetricWriter

_log = logging.getLogger("ctl")


class WriterGroup:
    """Writers as one; on processes other than the chief, those that want to hear everywhere."""

    def __init__(self, writers: Iterable[MetricWriter], check: Callable[[], None] | None = None):
        """Stores the writers.

        Args:
          writers: The metric writers.
          check: Called before each write; raises LeaseLostError if another job has taken model_dir over.
            Writers with a method `abandon` then write no more: what they hold is dropped.
        """
        self._writers = list(writers)
        self._check = check or (lambda: None)
        self._lock = threading.RLock()  # a save in the background is told from its own thread

    def __bool__(self) -> bool:
        return bool(self._writers)

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
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
                for writer in [w for w in self._writers if hasattr(w, "abandon")]:
                    self._writers.remove(writer)
                    writer.abandon()
            raise

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
