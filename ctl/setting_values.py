"""Checks and conversions of the values of settings."""

import dataclasses
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ctl.errors import UsageError

WORKER_RANGE_VARIABLE = "CTL_ELASTIC"  # MIN:MAX, from the launcher to the workers of an elastic job
_MAX_WORKERS = 1024


class WorkerRange(NamedTuple):
    """Smallest and largest number of workers of an elastic job."""

    minimum: int
    maximum: int


def are_names(value: Any) -> bool:
    """Returns True for a list of strings."""
    return isinstance(value, Sequence) and all(isinstance(v, str) for v in value)


def names_in(name: str, value: Any) -> tuple[str, ...]:
    """Returns one name or a list of names as a tuple. Raises UsageError for other values."""
    if isinstance(value, str):
        return (value,)
    check_type(name, value, Sequence[str])
    return tuple(value)


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Raises UsageError for a value that does not have the type of an annotation such as `float | None`.

    An integer is a valid float. True, False and NaN are not numbers.
    """
    options = _types_of(annotation)
    if not any(_IS_OF_TYPE[t](value) if t in _IS_OF_TYPE else isinstance(value, t) for t in options):
        names = (_NAME_OF_TYPE.get(t) or f"a ctl.{t.__name__}" for t in options)
        raise UsageError(f"{name} is {value!r:.80}; expected {' or '.join(names)}.")


def check_fields(settings: Any) -> None:
    """Raises UsageError for a field of a dataclass that does not have the type of its annotation.

    Fields of a user's subclass may have annotations of any form. Only those of `check_type` are checked.
    """
    for field in dataclasses.fields(settings):
        if is_checked(field.type):
            check_type(f"{type(settings).__name__} {field.name}", getattr(settings, field.name), field.type)


def is_checked(annotation: Any) -> bool:
    """Returns whether `check_type` supports all types of an annotation."""
    return all(t in _IS_OF_TYPE for t in _types_of(annotation))


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises UsageError unless `value` is one of the strings."""
    if not isinstance(value, str) or value not in choices:
        *first, last = map(repr, choices)
        raise UsageError(f"{name} is {value!r:.80}; expected {', '.join(first)} or {last}.")


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns `value` as an int. Raises UsageError unless it is an integer from `least` to `most`."""
    try:
        is_valid = not isinstance(value, bool) and int(value) == value and value >= least
    except (TypeError, ValueError, OverflowError):
        is_valid = False
    if not is_valid or (most is not None and value > most):
        limit = "" if most is None else f" and <= {most}"
        raise UsageError(f"{name} is {value!r}; expected a whole number >= {least}{limit}.")
    return int(value)


def parse_steps_per_loop(value: int | str) -> int | str:
    """Returns a number of steps, or "auto" for "auto" and 0. Raises UsageError for other values."""
    text = str(value)
    if text in ("auto", "0"):
        return "auto"
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise UsageError(f"steps_per_loop is {value!r}; expected a number of steps, or auto.")
    return int(text)


def parse_step_range(value: str) -> tuple[int, int]:
    """Returns the numbers of "first:last", or (0, 0) for "". Raises UsageError for other values."""
    if value == "":
        return 0, 0
    first, _, last = value.partition(":") if isinstance(value, str) else ("", "", "")
    if all(n.isascii() and n.isdigit() and len(n) < 19 for n in (first, last)) and int(first) < int(last):
        return int(first), int(last)
    raise UsageError(
        f"profile is {value!r}; expected two numbers of steps, first:last, the second one larger. "
        "Write profile='100:110' for the ten steps after step 100."
    )


def parse_worker_range(name: str, value: str) -> WorkerRange:
    """Parses "MIN:MAX". Raises UsageError unless 1 <= MIN <= MAX <= 1024.

    Args:
      name: Name of the setting for the message.
      value: Its value.
    """
    match = re.fullmatch("([0-9]{1,4}):([0-9]{1,4})", value)
    limits = WorkerRange(*map(int, match.groups())) if match else WorkerRange(0, 0)
    if not 1 <= limits.minimum <= limits.maximum <= _MAX_WORKERS:
        raise UsageError(
            f"{name} is {value!r}; expected MIN:MAX with 1 <= MIN <= MAX <= {_MAX_WORKERS}, such as 1:3."
        )
    return limits


def _types_of(annotation: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the only type."""
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and not math.isnan(value)


_IS_OF_TYPE: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool),
    float: _is_number,
    bool: lambda value: isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool",  # of NumPy
    str: lambda value: isinstance(value, str),
    types.NoneType: lambda value: value is None,
    Sequence[str]: lambda value: are_names(value) and not isinstance(value, str),
    Callable: callable,
    os.PathLike[str]: lambda value: isinstance(value, os.PathLike),
}
_NAME_OF_TYPE: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Sequence[str]: "a list of names",
    Callable: "a function",
    os.PathLike[str]: "a path",
    types.NoneType: "None",
}
