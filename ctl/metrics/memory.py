"""Metric writer to memory, for tests and for notebooks that draw their own charts."""

from collections.abc import Mapping

from ctl.metrics.protocol import Event, MetricWriter


class MemoryWriter(MetricWriter):
    """Metric writer that stores all metrics and events.

    Attributes:
      rows: Tuples (run, step, values) of all metrics, in the order of the calls.
      events: All events, in the order of the calls.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, dict[str, float]]] = []
        self.events: list[Event] = []

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Appends the metrics to `rows`."""
        self.rows.append((run, step, dict(values)))

    def note(self, event: Event) -> None:
        """Appends the event to `events`."""
        self.events.append(event)
