"""Converters for option values of both command lines. They raise ValueError("expected ...").

whole_number(1)("4")      -> 4
whole_number(1)("0")      ValueError: expected a whole number from 1
"""

import math
import re
from collections.abc import Callable

from ctl.errors import UsageError
from ctl.setting_values import WorkerRange, parse_worker_range

Convert = Callable[[str], object]


def whole_number(minimum: int, maximum: int = 10**9) -> Convert:
    """Returns a converter for integers in a range. Accepts strings and, from YAML, integers."""

    def convert(value: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", str(value)) or not minimum <= int(value) <= maximum:
            upper_limit = f" to {maximum}" if maximum < 10**9 else ""
            raise ValueError(f"expected a whole number from {minimum}{upper_limit}")
        return int(value)

    return convert


def worker_range(maximum: int) -> Convert:
    """Returns a converter for a number of workers from 1, or for "MIN:MAX"."""

    def convert(value: str) -> int | WorkerRange:
        if ":" not in value:
            return int(str(whole_number(1, maximum)(value)))
        try:
            return parse_worker_range("--workers", value)
        except UsageError as e:
            raise ValueError(str(e).partition("; ")[2].rstrip(".")) from None

    return convert


def number_in(accepts: Callable[[float], bool], expected: str) -> Convert:
    """Returns a converter for numbers for which `accepts` returns True. `expected` is part of the error."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not accepts(number):
            raise ValueError(f"expected {expected}")
        return number

    return convert


def text(value: str) -> str:
    """Returns `value` as a string. Raises ValueError if it is empty."""
    if not str(value):
        raise ValueError("expected a string that is not empty")
    return str(value)


def one_of(*choices: str) -> Convert:
    """Returns a converter for one of these strings, case-insensitive."""

    def convert(value: str) -> str:
        if str(value).upper() not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return str(value).upper()

    return convert
