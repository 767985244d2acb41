"""Callbacks of users that do not inherit from `ctl.Callback`."""

from collections.abc import Callable
from typing import Any

from ctl.callbacks.best_value import BestValue
from ctl.callbacks.protocol import EVENTS, Callback
from ctl.errors import UsageError


class CallbackAdapter(Callback):
    """Adapter for an object that has some of the methods and attributes of a `Callback`."""

    def __init__(self, wrapped: Any):
        self._wrapped = wrapped
        self.name = str(getattr(wrapped, "name", type(wrapped).__name__))
        self.restore_best = bool(getattr(wrapped, "restore_best", False))
        self.rollback = bool(getattr(wrapped, "rollback", False))
        monitored = getattr(wrapped, "best", None)
        self.monitored = monitored if isinstance(monitored, BestValue) else None

    @property
    def class_name(self) -> str:
        """Returns the name of the user's class."""
        return type(self._wrapped).__name__

    @property
    def state(self) -> Any:
        """State of the object, or None."""
        return getattr(self._wrapped, "state", None)

    @state.setter
    def state(self, saved: Any) -> None:
        self._wrapped.state = saved

    def has_stopped(self) -> bool:
        """Returns True if the callback has stopped the run."""
        return getattr(self._wrapped, "stopped_at", None) is not None

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Returns the methods that the user's object has, by event."""
        methods = {event: getattr(self._wrapped, event, None) for event in EVENTS}
        return {event: method for event, method in methods.items() if callable(method)}


def is_callback(candidate: Any) -> bool:
    """Returns True for an object with a method for one of EVENTS, except callbacks of Keras."""
    has_event = any(callable(getattr(candidate, event, None)) for event in EVENTS)
    return has_event and not hasattr(candidate, "set_model")


def as_callbacks(candidates: Any) -> list[Callback]:
    """Converts a list of callbacks, and of objects that have some of their methods, to callbacks.

    Args:
      candidates: The list.

    Raises:
      UsageError: It is no list, or contains callbacks of Keras or objects without any of the methods.
    """
    if not isinstance(candidates, (list, tuple)):
        raise UsageError(f"callbacks is {candidates!r}; expected a list, e.g. [ctl.EarlyStopping('loss')].")
    for i, candidate in enumerate(candidates):
        if hasattr(candidate, "set_model"):
            raise UsageError(
                f"callbacks[{i}] is a {type(candidate).__name__} of Keras, which is for ctl.fit. A "
                "ctl.Trainer takes callbacks of ctl, e.g. ctl.EarlyStopping('loss'); see ctl.Callback."
            )
        if not is_callback(candidate):
            raise UsageError(
                f"callbacks[{i}] is {candidate!r}; expected an object with on_metrics(step, values, run), "
                f"or one of {', '.join(EVENTS[1:])}, e.g. ctl.EarlyStopping('loss', patience=3)."
            )
    return [c if isinstance(c, Callback) else CallbackAdapter(c) for c in candidates]
