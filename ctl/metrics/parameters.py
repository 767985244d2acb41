"""The weights of a model as a table for people."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

Parameter = tuple[str, tuple[int, ...], str, bool]  # name, shape, dtype, trainable


class ParameterTotal(NamedTuple):
    """Sums over all weights; values are single numbers, not arrays."""

    num_values: int
    num_trainable: int
    num_bytes: int


def parameter_total(parameters: Sequence[Parameter]) -> ParameterTotal:
    """Adds up counts, trainable counts and bytes."""
    counts = [math.prod(shape) for _, shape, _, _ in parameters]
    trainable = sum(n for n, p in zip(counts, parameters, strict=True) if p[3])
    bits = sum(n * _dtype_bits(p[2]) for n, p in zip(counts, parameters, strict=True))
    return ParameterTotal(sum(counts), trainable, math.ceil(bits / 8))


def parameter_rows(parameters: Sequence[Parameter], most_rows: int) -> list[tuple[str, str, str]]:
    """`(name, shape, count)` of every weight; longer tables lose their middle, and say so."""
    rows = [(name, _shape(shape), f"{math.prod(shape):,}") for name, shape, _, _ in parameters]
    if len(rows) <= most_rows:
        return rows
    head = most_rows // 2
    tail = len(rows) - (most_rows - 1 - head)
    middle = sum(math.prod(shape) for _, shape, _, _ in parameters[head:tail])
    return [*rows[:head], (f"... {tail - head} more ...", "", f"{middle:,}"), *rows[tail:]]


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape) or "scalar"


def _dtype_bits(dtype: str) -> int:
    """float32 -> 32, bfloat16 -> 16, float8_e4m3fn -> 8, bool -> 8, string -> 0."""
    digits = re.search(r"\d+", dtype)
    if digits:
        return int(digits.group())
    return 8 if dtype == "bool" else 0
