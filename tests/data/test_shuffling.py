"""Permutations that are computed per index: complete, uniform, and different for each seed and epoch."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.data.shuffling import permuted


def permutations(size, *, seeds=(0,), epochs=(0,)):
    """Returns a permutation for each seed and epoch, `[p, size]`."""
    index = tf.tile(tf.range(size, dtype=tf.int64), [len(epochs)])
    numbers = tf.repeat(tf.constant(epochs, tf.int64), size)
    by_seed = [permuted(index, size, seed=seed, epochs=numbers).numpy() for seed in seeds]
    return np.concatenate(by_seed).reshape(-1, size)


@pytest.mark.parametrize("size", [2, 3, 8, 37, 1000])
def test_each_permutation_has_every_item_once(size):
    for permutation in permutations(size, seeds=(0, 1, 2**40), epochs=(0, 1, 2**33)):
        assert sorted(permutation) == list(range(size))


KEYS = {"epochs": range(2000), "seeds": range(500)}
CASES = [(size, key) for size in (5, 8, 37) for key in KEYS]


@pytest.mark.parametrize("case", some_of(CASES, (8, "epochs"), (5, "seeds")), ids=str)
def test_each_item_is_equally_often_at_each_place(case):
    """Chi-square per degree of freedom is about 1. With seed and epoch as the key it was over 2,000."""
    size, key = case
    orders = permutations(size, **{key: KEYS[key]})
    expected = len(orders) / size
    counts = np.array([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    chi_square = np.sum((counts - expected) ** 2 / expected) / (size - 1) ** 2
    assert chi_square < 2.5


def test_permutations_of_successive_epochs_are_independent():
    orders = permutations(37, epochs=range(1000))
    assert len({tuple(order) for order in orders}) == 1000  # a key of 8 bits had 256
    assert np.mean(orders[1:] == orders[:-1]) == pytest.approx(1 / 37, abs=0.006)
