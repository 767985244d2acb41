"""Metric writers of users that do not inherit from `ctl.MetricWriter`."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from ctl.metrics.protocol import Event, MetricWriter


@runtime_checkable
class MetricWriterLike(Protocol):
    """The methods that an object needs to be a metric writer."""

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Writes metrics."""

    def note(self, event: Event) -> None:
        """Handles an event of a run."""


class WriterAdapter(MetricWriter):
    """Adapter for an object with the methods `write` and `note`."""

    def __init__(self, wrapped: MetricWriterLike):
        self._wrapped = wrapped
        self._abandon = getattr(wrapped, "abandon", None)
        self.everywhere = bool(getattr(wrapped, "everywhere", False))
        self.metric = getattr(wrapped, "metric", None)

    @property
    def class_name(self) -> str:
        """Returns the name of the user's class."""
        return type(self._wrapped).__name__

    def write(self, step: int, values: Mapping[str, float], run: str = "train") -> None:
        """Writes metrics with the user's object."""
        self._wrapped.write(step, values, run)

    def note(self, event: Event) -> None:
        """Passes an event to the user's object."""
        self._wrapped.note(event)

    def abandon(self) -> bool:
        """Calls `abandon` of the user's object. Returns False if it has none."""
        if self._abandon is not None:
            self._abandon()
        return self._abandon is not None


def is_writer(candidate: Any) -> bool:
    """Returns True for an object with the methods of a metric writer."""
    return isinstance(candidate, MetricWriterLike)


def as_writers(candidates: Iterable[MetricWriterLike]) -> list[MetricWriter]:
    """Returns metric writers for metric writers and for objects with their methods."""
    return [c if isinstance(c, MetricWriter) else WriterAdapter(c) for c in candidates]
