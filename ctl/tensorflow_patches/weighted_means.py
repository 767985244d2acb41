"""Means of Keras metrics over replicas, in proportion to the examples of each replica.

A `keras.metrics.Mean` that gets a scalar, such as the loss of a batch, counts it once on every replica.
With shares of unequal size the result would differ from that of one device.

Purpose: `ctl.fit` has the same results on several replicas as on one device.
Replaces: `update_state` of `Mean` in `keras.src.metrics.reduction_metrics`.
Versions: Keras 3.0 and later; a no-op if the class does not exist.
Upstream issue: none known.
Switch: `weighted_means`. Without the patch scalars count once on every replica.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches

_MODULE = "keras.src.metrics.reduction_metrics"
_install_lock = threading.Lock()


class _Thread(threading.local):
    """The share of the global batch that the replica of this thread has; None: scalars count once."""

    share: Any = None


_thread = _Thread()


@contextlib.contextmanager
def weighted_means(share: Any) -> Iterator[None]:
    """Within the block, a scalar counts `share` times in a `Mean`, unless it comes with a weight."""
    _install()
    before, _thread.share = _thread.share, share
    try:
        yield
    finally:
        _thread.share = before


def _install() -> None:
    """Replaces `Mean.update_state` of Keras, once; it is unchanged outside of the block."""
    mean: Any = getattr(sys.modules.get(_MODULE), "Mean", None)
    with _install_lock:
        if mean is None or getattr(mean.update_state, "is_of_ctl", False):
            return
        if not switches.is_enabled("weighted_means"):
            return
        original = mean.update_state

        @functools.wraps(original)
        def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
            is_weighted = _thread.share is None or sample_weight is not None
            if not is_weighted and tf.convert_to_tensor(values).shape.rank == 0:
                sample_weight = _thread.share
            return original(self, values, sample_weight=sample_weight)

        update_state.is_of_ctl = True  # type: ignore[attr-defined]
        mean.update_state = update_state
