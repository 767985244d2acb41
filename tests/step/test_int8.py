"""Gradients with 8 bits on one worker: refused settings, and the error of rounding."""

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


class WithInt8(Small):
    def build(self):
        super().build()
        self.gradients = ctl.Gradients(wire_dtype="int8")


class Scaled(WithInt8):
    def build(self):
        super().build()
        self.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


@pytest.mark.parametrize(("trainer_class", "settings", "messages"), [
    (WithInt8, {"strategy": "mirrored", "num_virtual_devices": 2},
     ["'mirrored' and 2 replicas", "bfloat16"]),
    (WithInt8, {"sync_every": 4, "outer_learning_rate": 0.5}, ["sync_every=4", "bfloat16"]),
    (Scaled, {}, ["self.optimizer, a LossScaleOptimizer", "mixed_bfloat16"]),
])  # fmt: skip
def test_settings_that_do_not_support_8_bits_are_refused(trainer_class, settings, messages):
    with pytest.raises(ctl.UsageError) as raised:
        trainer_class(**{"strategy": "default", **settings}).train(1)
    assert all(message in str(raised.value) for message in ("wire_dtype='int8'", *messages)), raised.value


def test_on_one_device_no_gradient_is_rounded():
    trained = [cls(strategy="default", writers=[], seed=1) for cls in (Small, WithInt8)]
    for trainer in trained:
        trainer.train(3)
    unrounded, with_int8 = (trainer.model.get_weights() for trainer in trained)
    assert all(map(np.array_equal, unrounded, with_int8))


@given(arrays.arrays(np.float32, (3, BLOCK), elements=st.floats(-(2.0**99), 2.0**99, width=32)))
def test_a_number_is_off_by_half_a_step_of_its_block_at_most(numbers):
    packed = encoded(tf.constant(numbers))
    assert packed.shape == (3, BLOCK // 4 + 1) and packed.dtype == tf.int32
    largest = np.abs(numbers).max(axis=1, keepdims=True).astype(np.float64)
    errors = np.abs(decoded(packed).numpy().astype(np.float64) - numbers)
    assert np.all(errors <= np.maximum(largest / 127 * 0.501, 1.001e-30))  # the limit in float32 is larger


def test_the_largest_of_a_block_and_zeros_are_exact():
    numbers = np.zeros((2, BLOCK), np.float32)
    numbers[0, 5], numbers[0, 7] = 1 / 3, -1 / 3
    np.testing.assert_allclose(decoded(encoded(tf.constant(numbers))), numbers, rtol=2e-7)
