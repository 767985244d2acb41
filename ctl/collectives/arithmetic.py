"""Sums and scales of NumPy arrays, as Horovod's users expect them of each type."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OPS = {AVERAGE: "Average", SUM: "Sum", ADASUM: "Adasum", MIN: "Min", MAX: "Max", PRODUCT: "Product"}
_UFUNCS = {AVERAGE: np.add, SUM: np.add, MIN: np.minimum, MAX: np.maximum, PRODUCT: np.multiply}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BLOCK = 1 << 16  # elements that are added at a time: they stay in the cache
_FEW = 1024  # elements for which asking TensorFlow costs more than it saves
_HALVES = (np.dtype(np.float16), _BFLOAT16)


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """NumPy's type for a name such as "float32" or "bfloat16"."""
    if hasattr(ml_dtypes, name):
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def reduce_to(out: np.ndarray, op: int, one: np.ndarray, other: np.ndarray) -> None:
    """`out = one op other`, elementwise; sixteen-bit floats by way of float32."""
    if out.dtype == _BFLOAT16 and op in (SUM, AVERAGE) and out.size > _FEW:
        for start in range(0, out.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            _add_bfloat16(out[part], one[part], other[part])
    elif out.dtype in _HALVES and out.size > _FEW:
        out[...] = _by_tensorflow(op, one, other)
    elif out.dtype in _HALVES:
        wide = _UFUNCS[op](widened(one), widened(other))
        out[...] = narrowed(wide, out.dtype)
    else:
        _UFUNCS[op](one, other, out=out)


class _Scratch(threading.local):
    """Memory of each thread that adds."""

    def __init__(self) -> None:
        self.words = np.empty((2, _BLOCK), np.uint32)


_scratch = _Scratch()


def _add_bfloat16(out: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """`out = one + other`, rounded to the nearest; in this thread, as TensorFlow's wait for others."""
    total, more = _scratch.words[:, : out.size]
    total[...], more[...] = one.view(np.uint16), other.view(np.uint16)
    total <<= 16
    more <<= 16
    wide = total.view(np.float32)
    with np.errstate(all="ignore"):
        wide += more.view(np.float32)  # a NaN has no bits here that rounding could carry into others
    np.right_shift(total, 16, out=more)
    more &= 1
    more += 0x7FFF
    total += more
    total >>= 16
    out.view(np.uint16)[...] = total


def _by_tensorflow(op: int, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Thirty times as fast as NumPy for sixteen-bit floats, and with the same roundings."""
    import tensorflow as tf

    of = {AVERAGE: tf.add, SUM: tf.add, MIN: tf.minimum, MAX: tf.maximum, PRODUCT: tf.multiply}
    with tf.device("CPU:0"):
        return of[op](one, other).numpy()


def _of_halves(call: Callable[[Any], Any], halves: np.ndarray) -> np.ndarray:
    """`call` in float32. NumPy takes a microsecond for ten numbers too small for sixteen bits."""
    if halves.size <= _FEW:
        return narrowed(call(widened(halves)), halves.dtype)
    import tensorflow as tf

    with tf.device("CPU:0"):
        return tf.cast(call(tf.cast(halves, tf.float32)), halves.dtype).numpy()


def widened(halves: np.ndarray) -> np.ndarray:
    """Sixteen-bit floats as float32, exactly."""
    if halves.dtype == _BFLOAT16:
        bits = halves.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return halves.astype(np.float32)


def narrowed(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 as sixteen-bit floats, to the nearest, ties to even."""
    if dtype != _BFLOAT16:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    half = rounded.astype(np.uint16)
    if np.isnan(values).any():
        half[np.isnan(values)] = 0x7FC0
    return half.view(_BFLOAT16)


def scaled(array: np.ndarray, factor: float) -> np.ndarray:
    """`array * factor` in the array's type: integers by way of float64, cut towards zero."""
    if factor == 1.0:
        return array
    if array.dtype in _HALVES:
        return _of_halves(lambda wide: wide * np.float32(factor), array)
    if array.dtype.kind in "iub":
        return (array.astype(np.float64) * factor).astype(array.dtype)
    return array * array.dtype.type(factor)


def engine_divides(dtype: np.dtype) -> bool:
    """Whether the rank that adds up a mean of this type divides it as well, while it is in the cache."""
    return dtype in (np.float32, np.float64)


def averaged(total: np.ndarray, count: int) -> np.ndarray:
    """`total / count` in its own type, in place where it can be; integers are cut towards zero."""
    if count == 1:
        return total
    if total.dtype in _HALVES:
        return _of_halves(lambda wide: wide / np.float32(count), total)
    if total.dtype.kind == "i":
        return np.where(total < 0, -(-total // count), total // count).astype(total.dtype)
    if total.dtype.kind in "ub":
        return (total // count).astype(total.dtype)
    return np.divide(total, total.dtype.type(count), out=total if total.flags.writeable else None)


def finished(total: np.ndarray, op: int, count: int, postscale: float) -> np.ndarray:
    """What a rank makes of the reduced numbers of `count` ranks, in place where it can be."""
    mean = averaged(total, count) if op == AVERAGE else total
    if postscale != 1.0 and mean.dtype in (np.float32, np.float64) and mean.flags.writeable:
        return np.multiply(mean, mean.dtype.type(postscale), out=mean)
    return scaled(mean, postscale)


def accumulate(total: np.ndarray, halves: np.ndarray) -> None:
    """`total += halves`, a float32 sum of sixteen-bit floats."""
    if halves.size <= _FEW:
        total += widened(halves)
        return
    import tensorflow as tf

    with tf.device("CPU:0"):
        total += tf.cast(halves, tf.float32).numpy()


def rounded(total: np.ndarray, out: np.ndarray) -> None:
    """`out = total`, float32 to sixteen bits."""
    if total.size <= _FEW:
        out[...] = narrowed(total, out.dtype)
        return
    import tensorflow as tf

    with tf.device("CPU:0"):
        out[...] = tf.cast(total, out.dtype).numpy()


def is_half(dtype: np.dtype) -> bool:
    """Whether a type has sixteen bits per float: sums of more than two are made in float32."""
    return dtype in _HALVES


def rows_of(total: int, count: int) -> list[int]:
    """How `total` rows are dealt to `count` ranks: as equal as can be, the first ones get more."""
    return [total // count + (i < total % count) for i in range(count)]
