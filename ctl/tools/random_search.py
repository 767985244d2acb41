"""Ranges of settings for `ctl sweep --random=N`, and random combinations of them.

--learning_rate=1e-5:1e-2:log    logarithmic
--dropout=0:0.5                  uniform, also 0:0.5:uniform
--units=16:256:int               whole numbers; 16:256:int:log
--activation=relu,gelu           a choice
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctl.errors import UsageError

_COLON = re.compile(r"(?<!\\):")
_SCALES = {"uniform": "uniform", "linear": "uniform", "log": "log"}
_INTEGERS = ("int", "integer")
_MAX_DRAWS = 1000  # for each run, to find a combination that is new


@dataclass(frozen=True)
class ValueList:
    """A list of values to choose from.

    Attributes:
      values: The values.
    """

    values: Sequence[str]

    @property
    def size(self) -> float:
        """Number of different values."""
        return len(self.values)

    def draw(self, generator: random.Random) -> str:
        """Returns a random value."""
        return generator.choice(self.values)


@dataclass(frozen=True)
class NumberRange:
    """A range of numbers.

    Attributes:
      low: Smallest value.
      high: Largest value.
      is_log: True if logarithms are distributed uniformly, instead of the numbers.
      is_integer: True for whole numbers.
    """

    low: float
    high: float
    is_log: bool = False
    is_integer: bool = False

    @property
    def size(self) -> float:
        """Number of different values."""
        return self.high - self.low + 1 if self.is_integer else math.inf

    def draw(self, generator: random.Random) -> str:
        """Returns a random number as on the command line, with six digits if it is not whole."""
        # each whole number has the same width, so that the smallest and largest are as likely as others
        margin = 0.5 if self.is_integer else 0.0
        low, high = self.low - margin, self.high + margin
        if self.is_log:
            value = math.exp(generator.uniform(math.log(low), math.log(high)))
        else:
            value = generator.uniform(low, high)
        if self.is_integer:
            return str(min(max(round(value), int(self.low)), int(self.high)))
        text = f"{value:.6g}"
        return text if self.low <= float(text) <= self.high else repr(min(max(value, self.low), self.high))


def parse_range(argument: str, value: str) -> NumberRange | None:
    """Returns the range in the value of a flag, or None if the value is not a range.

    Args:
      argument: The whole argument, for messages.
      value: Its value, such as "1e-5:1e-2:log". A colon that is part of a value is written with a
        backslash.

    Raises:
      UsageError: If the range is invalid.
    """
    parts = _COLON.split(value)
    options = parts[2:]
    numbers = [_number(part) for part in parts[:2]]
    is_marked = bool(options) and options[-1] in (*_SCALES, *_INTEGERS)
    if len(parts) < 2 or (None in numbers and not is_marked):
        return None
    scales = [_SCALES[option] for option in options if option in _SCALES]
    is_integer = any(option in _INTEGERS for option in options)
    low, high = numbers
    if None in numbers or len(scales) > 1 or len(options) != len(scales) + int(is_integer):
        raise UsageError(
            f"{argument} is not a range; expected low:high, low:high:log, low:high:int or low:high:int:log "
            "with numbers, such as 1e-5:1e-2:log. Write a colon within a value as \\:"
        )
    assert low is not None and high is not None
    is_log = scales == ["log"]
    if not math.isfinite(high - low):
        raise UsageError(
            f"{argument} has limits or a width that are not finite; expected finite numbers, such as "
            "1e-5:1e-2:log."
        )
    if not low < high:
        raise UsageError(f"{argument} is an empty range; expected low < high, such as 1e-5:1e-2:log.")
    if is_log and low <= 0:
        raise UsageError(f"{argument} has the low value {low:g}; expected a number > 0 with log.")
    if is_integer and not (low.is_integer() and high.is_integer()):
        raise UsageError(f"{argument} has limits that are not whole; expected e.g. 16:256:int.")
    return NumberRange(low, high, is_log, is_integer)


def random_combinations(
    domains: Mapping[str, ValueList | NumberRange], count: int, seed: int
) -> list[dict[str, str]]:
    """Returns `count` different combinations. A larger count begins with the same ones.

    Raises:
      UsageError: If there are fewer combinations, or if random draws do not find as many.
    """
    size = math.prod(domain.size for domain in domains.values())
    if size < count:
        raise UsageError(
            f"--random={count} is more than the {size:.0f} combinations of the values; expected at most "
            f"--random={size:.0f}, or leave it out and list the values."
        )
    generator = random.Random(seed)
    combinations: dict[tuple[str, ...], dict[str, str]] = {}
    for _ in range(count * _MAX_DRAWS):
        settings = {name: domain.draw(generator) for name, domain in domains.items()}
        combinations.setdefault(tuple(settings.values()), settings)
        if len(combinations) == count:
            return list(combinations.values())
    num_combinations = len(combinations)
    raise UsageError(
        f"--random={count} found only {num_combinations} different combinations; expected wider ranges, or "
        "a smaller number of runs."
    )


def unescape(value: str) -> str:
    """Returns a value without the backslashes before colons."""
    return value.replace("\\:", ":")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
