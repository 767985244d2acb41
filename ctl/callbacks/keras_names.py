"""Errors for Keras's argument names in the callbacks of ctl, with the name to write instead."""

import difflib
import functools
from dataclasses import fields
from typing import Any, TypeVar

from ctl.errors import UsageError

_NAME_BY_KERAS_NAME = {
    "monitor": "metric",
    "restore_best_weights": "restore_best",
    "start_from_epoch": "start_from",
    "min_lr": "min_learning_rate",
    "filepath": "directory",
}
T = TypeVar("T")


def refuse_keras_names(callback_class: type[T]) -> type[T]:
    """Decorates a dataclass. An unknown argument raises UsageError with the nearest name of a field."""
    original = callback_class.__init__
    field_names = [field.name for field in fields(callback_class) if field.init]  # type: ignore[arg-type]

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        for name, value in options.items():
            if name not in field_names:
                nearest = _NAME_BY_KERAS_NAME.get(name) or next(
                    iter(difflib.get_close_matches(name, field_names, 1)), None
                )
                hint = f" Write {nearest}=..." if nearest in field_names else ""
                names = ", ".join(field_names)
                call = f"{callback_class.__name__}({name}={value!r})"
                raise UsageError(f"got {call}; expected only the arguments {names}.{hint}")
        original(self, *arguments, **options)

    setattr(callback_class, "__init__", __init__)  # noqa: B010  a method that mypy does not let assign
    return callback_class
