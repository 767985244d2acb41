"""Checks and conversions of the values of settings."""

from collections.abc import Sequence
from typing import Any

from ctl.errors import UsageError


def are_names(value: Any) -> bool:
    """Returns True for a list of strings."""
    return isinstance(value, Sequence) and all(isinstance(v, str) for v in value)


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
