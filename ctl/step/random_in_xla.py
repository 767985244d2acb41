"""TensorFlow's random numbers within XLA, so that a compiled loop draws the same dropout masks.

Both draw the same bits (Philox) and make other floating-point numbers of them: TensorFlow takes the low
bits of each word, XLA the high ones; their formulas for normal numbers differ; XLA cuts seeds to 32
bits. Here keys are made of seeds, and floats of bits, as TensorFlow does it: whole and uniform numbers are
equal, normal ones up to rounding. Of other distributions, such as truncated normal, XLA draws its own.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_stateless_random_ops_v2 as ops

_BITS = {tf.float32: 23, tf.float16: 10, tf.bfloat16: 7}  # that TensorFlow uses of a word
_LEAST = 1e-7  # whose logarithm is taken
_PHILOX, _THREEFRY = 1, 2  # algorithms; the second has other numbers
_KEY_OF_SEEDS = 0x02461E293EC8F720
_lock = threading.Lock()


@contextlib.contextmanager
def same_numbers() -> Iterator[None]:
    """What is traced within the block draws TensorFlow's numbers where XLA runs it. One at a time."""
    uniform, normal = ops.stateless_random_uniform_v2, ops.stateless_random_normal_v2

    def words(shape: Any, key: Any, counter: Any, alg: Any) -> Any:
        return ops.stateless_random_uniform_full_int_v2(shape, key, counter, alg, dtype=tf.uint32)

    def uniform_of_bits(
        shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
    ) -> Any:
        if not _is_known(dtype, alg):
            return uniform(shape, key, counter, alg, dtype=dtype, name=name)
        return _uniform(words(shape, key, counter, alg), tf.as_dtype(dtype))

    def normal_of_bits(
        shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
    ) -> Any:
        sizes = tf.get_static_value(tf.convert_to_tensor(shape))
        if not _is_known(dtype, alg) or sizes is None:
            return normal(shape, key, counter, alg, dtype=dtype, name=name)
        size = int(np.prod(sizes))
        pairs = tf.reshape(words([(size + 1) // 2 * 2], key, counter, alg), [-1, 2])
        first, second = tf.unstack(_uniform(pairs, tf.float32), axis=1)
        radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(first, _LEAST)))
        angle = np.float32(2.0 * np.pi) * second
        flat = tf.reshape(tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1), [-1])
        return tf.cast(tf.reshape(flat[:size], shape), dtype)

    replaced = {
        "stateless_random_uniform_v2": uniform_of_bits,
        "stateless_random_normal_v2": normal_of_bits,
        "stateless_random_get_key_counter": _key_and_counter,
    }
    with _lock:
        before = {name: getattr(ops, name) for name in replaced}
        try:
            vars(ops).update(replaced)
            yield
        finally:
            vars(ops).update(before)


def _key_and_counter(seed: Any, name: Any = None) -> tuple[Any, Any]:
    """As TensorFlow's kernel: the seed, drawn from as a counter under a key of its own."""
    counter = tf.bitcast(tf.cast(seed, tf.int64), tf.uint64)
    key = tf.constant([_KEY_OF_SEEDS], tf.uint64)
    mixed = ops.stateless_random_uniform_full_int_v2([4], key, counter, _PHILOX, dtype=tf.uint32)
    words = tf.reshape(tf.cast(mixed, tf.uint64), [2, 2])
    key, high = tf.unstack(
        tf.bitwise.bitwise_or(words[:, 0], tf.bitwise.left_shift(words[:, 1], tf.constant(32, tf.uint64)))
    )
    return key[None], tf.stack([tf.zeros_like(high), high])


def _is_known(dtype: Any, alg: Any) -> bool:
    return tf.as_dtype(dtype) in _BITS and tf.get_static_value(tf.convert_to_tensor(alg)) != _THREEFRY


def _uniform(words: Any, dtype: tf.DType) -> Any:
    bits = _BITS[dtype]
    low = tf.bitwise.bitwise_and(words, tf.constant(2**bits - 1, tf.uint32))
    return tf.cast(low, dtype) * tf.constant(2.0**-bits, dtype)
