"""Random numbers in XLA programs that are TensorFlow's, so that a compiled loop draws the same dropout masks.

For one seed both draw the same bits (Philox) and make other floating-point numbers of them: TensorFlow takes
the low bits of each word, XLA the high ones, and normal numbers come from two formulas. Here the floats are
made of the bits as TensorFlow does it: uniform ones are equal, normal ones up to rounding.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.dataset_traits import nodes_of
from ctl.errors import UsageError
from tensorflow.python.ops import gen_stateless_random_ops_v2 as ops

_BITS = {tf.float32: 23, tf.float16: 10, tf.bfloat16: 7}  # that TensorFlow uses of a word
_LEAST = 1e-7  # whose logarithm is taken
_THREEFRY = 2  # the algorithm that has other numbers
_WITH_STATE = frozenset({
    "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle",
    "ParameterizedTruncatedNormal", "Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2",
})  # fmt: skip
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
        size = tf.get_static_value(tf.reduce_prod(shape))
        if not _is_known(dtype, alg) or size is None:
            return normal(shape, key, counter, alg, dtype=dtype, name=name)
        pairs = tf.reshape(words([(int(size) + 1) // 2 * 2], key, counter, alg), [-1, 2])
        first, second = tf.unstack(_uniform(pairs, tf.float32), axis=1)
        radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(first, _LEAST)))
        angle = np.float32(2.0 * np.pi) * second
        flat = tf.reshape(tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1), [-1])
        return tf.cast(tf.reshape(flat[: int(size)], shape), dtype)

    with _lock:
        ops.stateless_random_uniform_v2, ops.stateless_random_normal_v2 = uniform_of_bits, normal_of_bits
        try:
            yield
        finally:
            ops.stateless_random_uniform_v2, ops.stateless_random_normal_v2 = uniform, normal


def _is_known(dtype: Any, alg: Any) -> bool:
    return tf.as_dtype(dtype) in _BITS and tf.get_static_value(tf.convert_to_tensor(alg)) != _THREEFRY


def _uniform(words: Any, dtype: tf.DType) -> Any:
    bits = _BITS[dtype]
    low = tf.bitwise.bitwise_and(words, tf.constant(2**bits - 1, tf.uint32))
    return tf.cast(low, dtype) * tf.constant(2.0**-bits, dtype)


def check_repeatable(graph: tf.Graph) -> None:
    """Raises UsageError for operations that XLA seeds with the time of day."""
    nodes, functions = nodes_of(graph.as_graph_def())
    everywhere = {node.op for body in (nodes, *functions.values()) for node in body}
    if drawn := sorted(everywhere & _WITH_STATE):
        raise UsageError(
            f"jit_compile='loop' with {', '.join(drawn)}, which no seed repeats within XLA. Write "
            "tf.random.stateless_uniform(shape, seed) and its like, or layers of Keras 3; or write "
            "--jit_compile=step."
        )
