"""Tables of the weights of a model."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

Parameter = tuple[str, tuple[int, ...], str, bool]  # name, shape, dtype, trainable


class ParameterTotal(NamedTuple):
    """Sums over all weights.

    Attributes:
      num_values: Number of elements of all weights.
      num_trainable: Number of elements of the trainable weights.
      num_bytes: Size of all weights.
    """

    num_values: int
    num_trainable: int
    num_bytes: int


def parameter_total(parameters: Sequence[Parameter]) -> ParameterTotal:
    """Returns the sums over `parameters`."""
    counts = [math.prod(shape) for _, shape, _, _ in parameters]
    trainable = sum(n for n, p in zip(counts, parameters, strict=True) if p[3])
    bits = sum(n * _dtype_bits(p[2]) for n, p in zip(counts, parameters, strict=True))
    return ParameterTotal(sum(counts), trainable, math.ceil(bits / 8))


def parameter_rows(parameters: Sequence[Parameter], max_rows: int) -> list[tuple[str, str, str]]:
    """Returns a row (name, shape, number of elements) for each weight.

    With more than `max_rows` weights, one row with their number replaces those in the middle.
    """
    rows = [(name, _shape(shape), f"{math.prod(shape):,}") for name, shape, _, _ in parameters]
    if len(rows) <= max_rows:
        return rows
    head = max_rows // 2
    tail = len(rows) - (max_rows - 1 - head)
    middle = sum(math.prod(shape) for _, shape, _, _ in parameters[head:tail])
    return [*rows[:head], (f"... {tail - head} more ...", "", f"{middle:,}"), *rows[tail:]]


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape) or "scalar"


def _dtype_bits(dtype: str) -> int:
    """Returns the size of an element (bits): float32 -> 32, float8_e4m3fn -> 8, bool -> 8, string -> 0."""
    digits = re.search(r"\d+", dtype)
    if digits:
        return int(digits.group())
    return 8 if dtype == "bool" else 0
