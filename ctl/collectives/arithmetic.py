"""Arithmetic of NumPy arrays with the roundings and dtypes of Horovod."""

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
_BLOCK = 1 << 16  # elements per block, which fits into the cache
_FEW = 1024  # elements; for fewer, a call of TensorFlow costs more than it saves
_HALVES = (np.dtype(np.float16), _BFLOAT16)


@functools.cache
def dtype_named(name: str) -> np.dtype:
    """Returns the NumPy dtype for a name such as "float32" or "bfloat16"."""
    if hasattr(ml_dtypes, name):
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def reduce_to(out: np.ndarray, op: int, one: np.ndarray, other: np.ndarray) -> None:
    """Computes `out = one op other` elementwise. 16-bit floats are computed in float32."""
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
    """Scratch memory of each thread."""

    def __init__(self) -> None:
        self.words = np.empty((2, _BLOCK), np.uint32)


_scratch = _Scratch()


def _add_bfloat16(out: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Computes `out = one + other`, rounded to nearest.

    Runs in the calling thread, because TensorFlow's kernels wait for other threads.
    """
    total, more = _scratch.words[:, : out.size]
    total[...], more[...] = one.view(np.uint16), other.view(np.uint16)
    total <<= 16
    more <<= 16
    wide = total.view(np.float32)
    with np.errstate(all="ignore"):
        wide += more.view(np.float32)  # the low bits of a NaN are 0, so rounding has no carry
    np.right_shift(total, 16, out=more)
    more &= 1
    more += 0x7FFF
    total += more
    total >>= 16
    out.view(np.uint16)[...] = total


def _by_tensorflow(op: int, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns `one op other`. For 16-bit floats 30 times as fast as NumPy, with the same roundings."""
    import tensorflow as tf

    of = {AVERAGE: tf.add, SUM: tf.add, MIN: tf.minimum, MAX: tf.maximum, PRODUCT: tf.multiply}
    with tf.device("CPU:0"):
        return of[op](one, other).numpy()


def _of_halves(call: Callable[[Any], Any], halves: np.ndarray) -> np.ndarray:
    """Returns `call` of 16-bit floats in float32. NumPy takes 1 µs per ten numbers that underflow."""
    if halves.size <= _FEW:
        return narrowed(call(widened(halves)), halves.dtype)
    import tensorflow as tf

    with tf.device("CPU:0"):
        return tf.cast(call(tf.cast(halves, tf.float32)), halves.dtype).numpy()


def widened(halves: np.ndarray) -> np.ndarray:
    """Returns 16-bit floats as float32, exactly."""
    if halves.dtype == _BFLOAT16:
        bits = halves.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return halves.astype(np.float32)


def narrowed(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns float32 values as 16-bit floats, rounded to nearest, ties to even."""
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
    """Returns `array * factor` in the array's dtype. Integers are computed in float64 and truncated."""
    if factor == 1.0:
        return array
    if array.dtype in _HALVES:
        return _of_halves(lambda wide: wide * np.float32(factor), array)
    if array.dtype.kind in "iub":
        return (array.astype(np.float64) * factor).astype(array.dtype)
    return array * array.dtype.type(factor)


def engine_divides(dtype: np.dtype) -> bool:
    """Returns True if the rank that sums a mean of this dtype also divides it, while it is in the cache."""
    return dtype in (np.float32, np.float64)


def averaged(total: np.ndarray, count: int) -> np.ndarray:
    """Returns `total / count` in the same dtype, in place if possible. Integers are truncated."""
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
    """Returns the final value of a reduction over `count` ranks: mean and scale, in place if possible."""
    mean = averaged(total, count) if op == AVERAGE else total
    if postscale != 1.0 and mean.dtype in (np.float32, np.float64) and mean.flags.writeable:
        return np.multiply(mean, mean.dtype.type(postscale), out=mean)
    return scaled(mean, postscale)


def accumulate(total: np.ndarray, halves: np.ndarray) -> None:
    """Computes `total += halves`, a float32 sum of 16-bit floats."""
    if halves.size <= _FEW:
        total += widened(halves)
        return
    import tensorflow as tf

    with tf.device("CPU:0"):
        total += tf.cast(halves, tf.float32).numpy()


def rounded(total: np.ndarray, out: np.ndarray) -> None:
    """Computes `out = total`, float32 to 16-bit floats."""
    if total.size <= _FEW:
        out[...] = narrowed(total, out.dtype)
        return
    import tensorflow as tf

    with tf.device("CPU:0"):
        out[...] = tf.cast(total, out.dtype).numpy()


def is_half(dtype: np.dtype) -> bool:
    """Returns True for 16-bit floats. Their sums of more than two numbers are computed in float32."""
    return dtype in _HALVES


def rows_of(total: int, count: int) -> list[int]:
    """Returns the number of rows of each of `count` ranks. The first ranks get the remainder."""
    return [total // count + (i < total % count) for i in range(count)]
