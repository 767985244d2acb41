"""Statistics of synchronized BatchNormalization when a replica has no example.

Such a replica calls the layers with a placeholder row. Keras counts it in the mean and the variance over
all replicas. Here it does not count.

Purpose: Several replicas have the statistics of one device, also for a short last batch.
Replaces: `_compute_moments_sync` in `keras.src.backend.tensorflow.nn`.
Versions: Keras 3.0 and later; a no-op if the function does not exist.
Upstream issue: none known.
Switch: `synchronized_moments`. Without the patch placeholder rows count.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches

_MODULE = "keras.src.backend.tensorflow.nn"
_install_lock = threading.Lock()


class _Thread(threading.local):
    """Thread-local `[]` bool, True where the replica that this thread traces has no example, or None."""

    is_empty: Any = None


_thread = _Thread()


@contextlib.contextmanager
def without_placeholders(is_empty: Any) -> Iterator[None]:
    """Within the block, the rows of an empty replica do not count in synchronized statistics."""
    if is_empty is not None:
        _install()
    before, _thread.is_empty = _thread.is_empty, is_empty
    try:
        yield
    finally:
        _thread.is_empty = before


def _install() -> None:
    """Wraps the private function of Keras once. The wrapper has no effect outside of the block."""
    module: Any = sys.modules.get(_MODULE)
    with _install_lock:
        original = getattr(module, "_compute_moments_sync", None)
        if original is None or getattr(original, "is_of_ctl", False):
            return
        if not switches.is_enabled("synchronized_moments"):
            return

        @functools.wraps(original)
        def compute_moments_sync(x: Any, axes: Any, keepdims: bool) -> Any:
            if _thread.is_empty is None:
                return original(x, axes, keepdims)
            return _moments(x, axes, keepdims, tf.where(_thread.is_empty, 0.0, 1.0))

        compute_moments_sync.is_of_ctl = True  # type: ignore[attr-defined]
        module._compute_moments_sync = compute_moments_sync


def _moments(x: Any, axes: Any, keepdims: bool, weight: Any) -> tuple[Any, Any]:
    """Returns mean and variance of `x` over `axes` and replicas; `weight` is that of the local rows."""
    context = tf.distribute.get_replica_context()
    weight = tf.cast(weight, x.dtype)

    def total(values: Any) -> Any:
        local_sum = tf.reduce_sum(values * weight, axis=axes, keepdims=True)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, local_sum)

    sums, squares, counts = total(x), total(tf.square(x)), total(tf.ones_like(x))
    mean = tf.math.divide_no_nan(sums, counts)
    variance = tf.maximum(tf.math.divide_no_nan(squares, counts) - tf.square(mean), 0.0)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
