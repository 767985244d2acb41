"""Random permutations that are computed per index.

`RandomIndexShuffle` is a block cipher. For few examples it uses only the lowest bits of its key, and with
the small numbers of seeds and epochs as the key its permutations stay close to the order of the examples
(TensorFlow 2.21). The key is therefore a hash of both: the finalizer of SplitMix64 (Steele, Lea and Flood,
"Fast Splittable Pseudorandom Number Generators", 2014).
"""

from typing import Any

import tensorflow as tf

_ROUNDS = 8
_KEY_BITS = 21  # of each of three keys
_INCREMENT, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def permuted(index: Any, size: int, *, seed: Any, epochs: Any) -> Any:
    """Returns the places of some items in a permutation of `size` items, int64 `[b]`.

    Args:
      index: Numbers of the items, int64 `[b]`.
      size: Number of items.
      seed: Seed of all permutations.
      epochs: Number of the permutation of each item, int64 `[b]`.
    """
    # The Python wrapper, tf.random.experimental.index_shuffle, pads a seed per row wrongly.
    return tf.raw_ops.RandomIndexShuffle(
        index=index, seed=_keys(seed, epochs), max_index=tf.constant(size - 1, tf.int64), rounds=_ROUNDS
    )


def _keys(seed: Any, epochs: Any) -> Any:
    """Returns three keys for each epoch, int64 `[b, 3]`, from the bits of one hash."""
    increments = tf.cast(tf.stack([epochs * 0 + tf.cast(seed, tf.int64), epochs]), tf.uint64)
    state = _hashed(_hashed(increments[0]) + increments[1])
    keys = [tf.bitwise.right_shift(state, _uint64(_KEY_BITS * i)) for i in range(3)]
    return tf.cast(tf.stack(keys, axis=1) & _uint64(2**_KEY_BITS - 1), tf.int64)


def _hashed(numbers: Any) -> Any:
    """Returns the next state of SplitMix64 for each number, uint64 `[b]`."""
    numbers = numbers + _uint64(_INCREMENT)
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        numbers = (numbers ^ tf.bitwise.right_shift(numbers, _uint64(shift))) * _uint64(factor)
    return numbers ^ tf.bitwise.right_shift(numbers, _uint64(31))


def _uint64(number: int) -> Any:
    return tf.constant(number, tf.uint64)
