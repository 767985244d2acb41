"""State of TensorFlow's eager context: initialization, global seed, determinism.

Purpose: TensorFlow cannot be configured after its context is initialized, and it has no public function
  that reads the global seed, the position in the sequence of seeds of operations, or determinism.
Uses: `tensorflow.python.eager.context`: `_context._initialized`, `context()._rng`, `global_seed`;
  `tensorflow.python.framework.config.is_op_determinism_enabled`.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known.
Switch: none, as these are calls.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


def eager_context() -> Any:
    """Returns the context of this process."""
    from tensorflow.python.eager import context

    return context.context()


def is_context_initialized() -> bool:
    """Returns True if TensorFlow has created a tensor in this process."""
    from tensorflow.python.eager import context

    existing = context._context  # `context()` creates one
    return existing is not None and bool(existing._initialized)


def global_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`, or None."""
    from tensorflow.python.eager import context

    seed: int | None = context.global_seed()
    return seed


def is_op_determinism_enabled() -> bool:
    """Returns True after `tf.config.experimental.enable_op_determinism`."""
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


@contextlib.contextmanager
def operation_seeds_kept() -> Iterator[None]:
    """Continues the sequence of seeds of operations after the block where it was before."""
    generator = getattr(eager_context(), "_rng", None)
    state = None if generator is None else generator.getstate()
    try:
        yield
    finally:
        if generator is not None:
            generator.setstate(state)


@contextlib.contextmanager
def tensorflow_seed_kept() -> Iterator[None]:
    """Restores TensorFlow's global seed, and the position in its sequence of seeds of operations."""
    import tensorflow as tf

    seed, generator = global_seed(), getattr(eager_context(), "_rng", None)
    try:
        yield
    finally:
        tf.random.set_seed(seed)
        if generator is not None:
            eager_context()._rng = generator
