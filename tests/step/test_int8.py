"""Gradients with 8 bits on one worker: what is refused, and what rounding changes."""

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from ctl.step.reducers.int8 import BLOCK, decoded, encoded
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from small_models import Small


class Wired(Small):
    def build(self):
        super().build()
        self.gradients = ctl.Gradients(wire_dtype="int8")


class Scaled(Wired):
    def build(self):
        super().build()
        self.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


@pytest.mark.parametrize(("kind", "settings", "words"), [
    (Wired, {"strategy": "mirrored", "num_virtual_devices": 2}, ["'mirrored' and 2 replicas", "bfloat16"]),
    (Wired, {"sync_every": 4, "outer_learning_rate": 0.5}, ["sync_every=4", "bfloat16"]),
    (Scaled, {}, ["self.optimizer, a LossScaleOptimizer", "mixed_bfloat16"]),
])  # fmt: skip
def test_where_gradients_cannot_travel_so_is_refused(kind, settings, words):
    with pytest.raises(ctl.UsageError) as raised:
        kind(**{"strategy": "default", **settings}).train(1)
    assert all(word in str(raised.value) for word in ("wire_dtype='int8'", *words)), raised.value


def test_on_one_device_nothing_is_rounded():
    trained = [kind(strategy="default", writers=[], seed=1) for kind in (Small, Wired)]
    for trainer in trained:
        trainer.train(3)
    one, other = (trainer.model.get_weights() for trainer in trained)
    assert all(map(np.array_equal, one, other))


@given(arrays.arrays(np.float32, (3, BLOCK), elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_a_number_is_off_by_half_a_step_of_its_block_at_most(numbers):
    words = encoded(tf.constant(numbers))
    assert words.shape == (3, BLOCK // 4 + 1) and words.dtype == tf.int32
    largest = np.abs(numbers).max(axis=1, keepdims=True).astype(np.float64)
    off = np.abs(decoded(words).numpy().astype(np.float64) - numbers)
    assert np.all(off <= np.maximum(largest / 127 * 0.501, 1.001e-30))  # the limit in float32 is larger


def test_the_largest_of_a_block_and_zeros_are_exact():
    numbers = np.zeros((2, BLOCK), np.float32)
    numbers[0, 5], numbers[0, 7] = 1 / 3, -1 / 3
    np.testing.assert_allclose(decoded(encoded(tf.constant(numbers))), numbers, rtol=2e-7)
