"""Refusal of Keras's argument names in the callbacks of ctl, with the name to write instead."""

import difflib
import functools
from dataclasses import fields
from typing import Any, TypeVar

from ctl.errors import UsageError

_NAMES = {
    "monitor": "metric",
    "restore_best_weights": "restore_best",
    "start_from_epoch": "start_from",
    "min_lr": "min_learning_rate",
    "filepath": "directory",
}
T = TypeVar("T")


def refuse_keras_names(kind: type[T]) -> type[T]:
    """Decorates a dataclass: an unknown argument raises UsageError that names the nearest one."""
    original = kind.__init__
    known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        for name, value in options.items():
            if name not in known:
                nearest = _NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, 1)), None)
                hint = f" Write {nearest}=..." if nearest in known else ""
                raise UsageError(
                    f"{kind.__name__} got {name}={value!r}; expected only {', '.join(known)}.{hint}"
                )
        original(self, *arguments, **options)

    setattr(kind, "__init__", __init__)  # noqa: B010  a method that mypy does not let assign
    return kind
