"""Converters for option values of both command lines. They raise ValueError("expected ...").

whole_number(1)("4")      -> 4
whole_number(1)("0")      ValueError: expected a whole number from 1
"""

import math
import re
from collections.abc import Callable

Convert = Callable[[str], object]


def whole_number(least: int, most: int = 10**9) -> Convert:
    """Returns a converter for integers, from text or, in YAML, from int."""

    def convert(word: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", str(word)) or not least <= int(word) <= most:
            to = f" to {most}" if most < 10**9 else ""
            raise ValueError(f"expected a whole number from {least}{to}")
        return int(word)

    return convert


def number_in(accepts: Callable[[float], bool], expected: str) -> Convert:
    """Returns a converter for numbers that `accepts` allows."""

    def convert(word: str) -> float:
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not accepts(value):
            raise ValueError(f"expected {expected}")
        return value

    return convert


def text(value: str) -> str:
    """Returns text that is not empty."""
    if not str(value):
        raise ValueError("expected something")
    return str(value)


def one_of(*known: str) -> Convert:
    """Returns a converter for one of these strings, case-insensitive."""

    def convert(word: str) -> str:
        if str(word).upper() not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return str(word).upper()

    return convert
