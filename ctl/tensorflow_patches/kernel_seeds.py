"""The global seed, set without the loss of compiled kernels.

Purpose: `tf.random.set_seed` discards the compiled kernels of all functions, so that random operations
  begin again. Each further call of `train` would then optimize the traced step again.
Replaces: `tensorflow.python.framework.random_seed.get_seed` by a function that records its calls. Calls
  of tf.data are excluded, because its kernels keep no seed. Sets `context()._seed` and `context()._rng`.
Versions: TensorFlow 2.16 and later.
Upstream issue: none.
Switch: `kernel_seeds`. Without the patch kernels are discarded, as in processes with random operations.
"""

import functools
import random
import types
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches
from ctl.tensorflow_patches.eager_context import eager_context, is_context_initialized
from tensorflow.python.data.util import random_seed as dataset_seed
from tensorflow.python.framework import random_seed

_has_random_operations = is_context_initialized()  # operations before this import are unknown


def set_seed(seed: int) -> None:
    """Sets TensorFlow's global seed, with the effect of `tf.random.set_seed`.

    Discards compiled kernels only if a random operation may have been created in this process.

    Args:
      seed: The seed.
    """
    if _has_random_operations or not tf.executing_eagerly() or not switches.is_enabled("kernel_seeds"):
        tf.random.set_seed(seed)
        return
    context = eager_context()
    context._seed, context._rng = seed, random.Random(seed)


def _record_operations() -> None:
    """Replaces the function that operations call for their seeds."""
    get_seed = random_seed.get_seed
    if hasattr(get_seed, "__wrapped__"):  # this module was imported again
        return

    @functools.wraps(get_seed)
    def recorded(op_seed: Any) -> Any:
        global _has_random_operations  # noqa: PLW0603  kernels belong to the process
        _has_random_operations = True
        return get_seed(op_seed)

    random_seed.get_seed = recorded
    dataset_seed.random_seed = types.SimpleNamespace(get_seed=get_seed)


_record_operations()
