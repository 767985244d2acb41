"""Calls of a function before a mirrored variable is assigned in replica context.

Purpose: TensorFlow lets a step assign a variable without aggregation. The replicas then have different
  values, and a checkpoint contains one of them. `ctl.step.replica_assignments` raises an error.
Replaces: `_update_replica` of `tensorflow.python.distribute.values.MirroredVariable`; calls its method
  `_get_on_device_or_primary`.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known.
Switch: `mirrored_assignments`. Without the patch such steps run.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches

_install_lock = threading.Lock()


def check_assignments(check: Callable[[Any, Any], None]) -> None:
    """Calls `check(variable, value)` before each assignment from now on; idempotent."""
    from tensorflow.python.distribute import values

    with _install_lock:
        original = values.MirroredVariable._update_replica
        if getattr(original, "is_checked_by_ctl", False) or not switches.is_enabled("mirrored_assignments"):
            return

        @functools.wraps(original)
        def update_replica(self: Any, update_fn: Any, value: Any, **kwargs: Any) -> Any:
            check(self, value)
            return original(self, update_fn, value, **kwargs)

        update_replica.is_checked_by_ctl = True  # type: ignore[attr-defined]
        values.MirroredVariable._update_replica = update_replica


def captured_handle(variable: Any, graph: Any) -> tf.Tensor:
    """Returns the handle of this replica's part of a mirrored variable, as a tensor of the graph."""
    return graph.capture(variable._get_on_device_or_primary().handle)
