"""Values of eager tensors are not copied."""

import numpy as np
import tensorflow as tf
from ctl.tensorflow_patches import eager_values


def test_the_values_share_the_memory_of_the_tensor():
    tensor = tf.range(1000.0) + 1.0
    values = eager_values.values_of(tensor)
    assert np.shares_memory(values, eager_values.values_of(tensor))
    np.testing.assert_array_equal(values, np.arange(1, 1001))


def test_the_public_method_copies():
    tensor = tf.range(1000.0) + 1.0
    assert not np.shares_memory(tensor.numpy(), eager_values.values_of(tensor))


def test_tensors_without_the_method_are_copied():
    class Other:
        def numpy(self):
            return np.ones(3)

    assert eager_values.values_of(Other()).sum() == 3
