"""Values of an eager tensor without a copy.

Purpose: `tf.Tensor.numpy` copies the values; collectives only read them.
Uses: `_numpy` of `tensorflow.python.framework.ops.EagerTensor`.
Versions: TensorFlow 2.16 and later. Without the method, the values are copied.
Upstream issue: none known.
Switch: none, as this is a call.
"""

from typing import Any

import numpy as np


def values_of(tensor: Any) -> np.ndarray:
    """Returns the values, which share the memory of the tensor if that is in the memory of the host."""
    values = tensor._numpy() if hasattr(tensor, "_numpy") else tensor.numpy()
    return np.asarray(values)
