"""Keeps what it is told; for tests and for notebooks that draw their own charts."""

from collections.abc import Mapping

from ctl.metrics.protocol import Event, MetricWriter


class MemoryWriter(MetricWriter):
    """Remembers every call: `rows` of `(run, step, values)` and `events`, in order of arrival."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, dict[str, float]]] = []
        self.events: list[Event] = []

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        self.rows.append((run, step, dict(values)))

    def note(self, event: Event) -> None:
        self.events.append(event)
