"""Within a compiled loop random numbers are TensorFlow's, not XLA's."""

import numpy as np
import pytest
import tensorflow as tf
from ctl.tensorflow_patches import random_in_xla
from patching import turn_off


def draw_numbers(draw, compiled, seed=(3, 2**40)):
    seed = tf.constant(seed, tf.int64)
    if not compiled:
        return tf.function(draw)(seed).numpy()
    with random_in_xla.same_numbers():
        return tf.function(draw, jit_compile=True).get_concrete_function(seed)(seed).numpy()


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16])
def test_uniform_numbers_are_equal(dtype):
    def draw(seed):
        return tf.random.stateless_uniform([3, 7], seed, dtype=dtype)

    np.testing.assert_array_equal(draw_numbers(draw, compiled=True), draw_numbers(draw, compiled=False))


@pytest.mark.parametrize("seed", [(2**31, 5), (-1, 7), (0, -(2**50))])
def test_whole_numbers_are_equal_for_seeds_of_64_bits(seed):
    def draw(seed):
        return tf.random.stateless_uniform([9], seed, minval=-5, maxval=2**30, dtype=tf.int32)

    np.testing.assert_array_equal(draw_numbers(draw, True, seed), draw_numbers(draw, False, seed))


@pytest.mark.parametrize("shape", [[3, 7], []])
def test_normal_numbers_are_equal_up_to_rounding(shape):
    def draw(seed):
        return tf.random.stateless_normal(shape, seed)

    actual, expected = (draw_numbers(draw, compiled) for compiled in (True, False))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_other_dtypes_are_left_to_xla_and_functions_are_put_back():
    before = vars(random_in_xla.ops).copy()
    numbers = draw_numbers(
        lambda seed: tf.random.stateless_uniform([50], seed, dtype=tf.float64), compiled=True
    )
    assert 0.3 < numbers.mean() < 0.7
    assert vars(random_in_xla.ops) == before


def test_without_the_patch_xla_draws_other_numbers(monkeypatch):
    def draw(seed):
        return tf.random.stateless_uniform([3, 7], seed)

    turn_off(monkeypatch, "random_in_xla")
    assert (draw_numbers(draw, compiled=True) != draw_numbers(draw, compiled=False)).any()
