"""TensorFlow's random numbers within XLA, so that a compiled loop draws the same dropout masks.

TensorFlow and XLA draw the same bits (Philox) but convert them differently: TensorFlow uses the low bits of
each word, XLA the high ones; their formulas for normal numbers differ; XLA truncates seeds to 32 bits. Here
seeds become keys, and bits become floats, as in TensorFlow: integers and uniform numbers are equal, normal
numbers are equal up to rounding. Other distributions, such as truncated normal, keep XLA's numbers.

Purpose: A loop in one XLA program has the same losses as the same steps without XLA.
Replaces: `stateless_random_uniform_v2`, `stateless_random_normal_v2` and
  `stateless_random_get_key_counter` in `tensorflow.python.ops.gen_stateless_random_ops_v2`, within a block.
Versions: TensorFlow 2.16 and later.
Upstream issue: https://github.com/tensorflow/tensorflow/issues/121243
Switch: `random_in_xla`. Without the patch XLA draws its own numbers.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.tensorflow_patches import switches
from tensorflow.python.ops import gen_stateless_random_ops_v2 as ops

_BITS = {tf.float32: 23, tf.float16: 10, tf.bfloat16: 7}  # used by TensorFlow, of each word
_MIN_UNIFORM = 1e-7  # lower limit in front of a logarithm
_PHILOX, _THREEFRY = 1, 2  # algorithms
_KEY_OF_SEEDS = 0x02461E293EC8F720
_lock = threading.Lock()


@contextlib.contextmanager
def same_numbers() -> Iterator[None]:
    """Operations traced within the block draw TensorFlow's numbers in XLA. One block at a time."""
    if not switches.is_enabled("random_in_xla"):
        yield
        return
    uniform, normal = ops.stateless_random_uniform_v2, ops.stateless_random_normal_v2

    def random_words(shape: Any, key: Any, counter: Any, alg: Any) -> Any:
        return ops.stateless_random_uniform_full_int_v2(shape, key, counter, alg, dtype=tf.uint32)

    def uniform_of_bits(
        shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
    ) -> Any:
        if not _is_known(dtype, alg):
            return uniform(shape, key, counter, alg, dtype=dtype, name=name)
        return _uniform(random_words(shape, key, counter, alg), tf.as_dtype(dtype))

    def normal_of_bits(
        shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
    ) -> Any:
        sizes = tf.get_static_value(tf.convert_to_tensor(shape))
        if not _is_known(dtype, alg) or sizes is None:
            return normal(shape, key, counter, alg, dtype=dtype, name=name)
        size = int(np.prod(sizes))
        pairs = tf.reshape(random_words([(size + 1) // 2 * 2], key, counter, alg), [-1, 2])
        first, second = tf.unstack(_uniform(pairs, tf.float32), axis=1)
        radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(first, _MIN_UNIFORM)))
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
    """Returns the key and the counter for a seed, as TensorFlow's kernel computes them."""
    counter = tf.bitcast(tf.cast(seed, tf.int64), tf.uint64)
    key = tf.constant([_KEY_OF_SEEDS], tf.uint64)
    mixed = ops.stateless_random_uniform_full_int_v2([4], key, counter, _PHILOX, dtype=tf.uint32)
    halves = tf.reshape(tf.cast(mixed, tf.uint64), [2, 2])
    key, high = tf.unstack(
        tf.bitwise.bitwise_or(halves[:, 0], tf.bitwise.left_shift(halves[:, 1], tf.constant(32, tf.uint64)))
    )
    return key[None], tf.stack([tf.zeros_like(high), high])


def _is_known(dtype: Any, alg: Any) -> bool:
    return tf.as_dtype(dtype) in _BITS and tf.get_static_value(tf.convert_to_tensor(alg)) != _THREEFRY


def _uniform(random_words: Any, dtype: tf.DType) -> Any:
    bits = _BITS[dtype]
    low = tf.bitwise.bitwise_and(random_words, tf.constant(2**bits - 1, tf.uint32))
    return tf.cast(low, dtype) * tf.constant(2.0**-bits, dtype)
