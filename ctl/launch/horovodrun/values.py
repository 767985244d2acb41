"""What the options of `ctlrun` take: a function per kind, which raises ValueError in words.

whole(1)("4")      -> 4
whole(1)("0")      ValueError: expected a whole number from 1
"""

import math
import re
from collections.abc import Callable

Convert = Callable[[str], object]


def whole(least: int, most: int = 10**9) -> Convert:
    """A whole number; one that the command's own type gave, as YAML does, is taken as well."""

    def convert(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", str(text)) or not least <= int(text) <= most:
            to = f" to {most}" if most < 10**9 else ""
            raise ValueError(f"expected a whole number from {least}{to}")
        return int(text)

    return convert


def number(text: str) -> float:
    """A number from 0, such as 0.5."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e9:
        raise ValueError("expected a number from 0")
    return value


def words(text: str) -> str:
    """Anything but nothing."""
    if not str(text):
        raise ValueError("expected something")
    return str(text)


def one_of(*known: str) -> Convert:
    """One of these, in any case."""

    def convert(text: str) -> str:
        if str(text).upper() not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return str(text).upper()

    return convert
