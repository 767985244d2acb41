"""Tells several reports; one that fails is named once and left out from then on."""

import logging
import threading
from collections.abc import Iterable, Mapping

from ctl.metrics.protocol import Event, Report

_log = logging.getLogger("ctl")


class ReportGroup:
    """Reports as one; on processes other than the chief, those that want to hear everywhere."""

    def __init__(self, reports: Iterable[Report]):
        self._reports = list(reports)
        self._lock = threading.RLock()  # a save in the background is told from its own thread

    def __bool__(self) -> bool:
        return bool(self._reports)

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        self._each(lambda report: report.write(step, values, run))

    def note(self, event: Event) -> None:
        if self._reports:
            self._each(lambda report: report.note(event))

    def _each(self, call) -> None:
        with self._lock:
            for report in list(self._reports):
                try:
                    call(report)
                except Exception as e:
                    self._reports.remove(report)
                    _log.warning(
                        "%s failed and is left out from now on: %s: %s",
                        type(report).__name__, type(e).__name__, e,
                    )  # fmt: skip
