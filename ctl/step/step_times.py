"""Seconds of a worker's steps that it waits: for its input, and for the other workers.

Workers in step all take as long as the slowest one. What tells them apart is how long each waits in the
sum of the gradients: the slowest least. A worker's clock is compared with itself only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config


class StepTimes:
    """Adds the seconds up in a variable, within the graph of the steps.

    Not where operations are deterministic: TensorFlow then has no clock, and the totals are NaN.

    Args:
      first: number of this process's first replica; the others wait as long as it does.
    """

    def __init__(self, first: int):
        self._first = first
        with tf.device("/device:CPU:0"):
            self._secs = tf.Variable(tf.zeros([2], tf.float64), trainable=False, name="step_times")

    def total(self) -> np.ndarray:
        """`[2]`: seconds until now in which steps waited for sums, and for their input."""
        found: np.ndarray = self._secs.numpy()
        return found if _has_clock() else np.full(2, np.nan)

    def of_sum(self, ready: Sequence[Any], act: Callable[[], Any], *, asks: bool = False) -> Any:
        """Called in the trace: `act()`, which waits for other workers once the tensors `ready` exist.

        `asks`: one operation asks, another one waits. TensorFlow keeps what has an effect in the order
        of the program: asking after the clock was read would wait for all of `ready`.
        """
        context = tf.distribute.get_replica_context()
        here = context is None or int(tf.get_static_value(context.replica_id_in_sync_group)) == self._first
        if not (here and _has_clock()):
            return act()
        before = None if asks else _now(ready)
        done = act()
        before = _now(ready) if asks else before
        self._add([_now([done]) - before, 0.0])
        return done

    def of_input(self, act: Callable[[], Any]) -> Any:
        """Called in the trace: `act()`, which takes a batch."""
        if not _has_clock():
            return act()
        with tf.control_dependencies([before := _now([])]):
            taken = act()
        self._add([0.0, _now([taken]) - before])
        return taken

    def _add(self, secs: list) -> None:
        self._secs.assign_add(tf.stack([tf.cast(s, tf.float64) for s in secs]), read_value=False)


def _has_clock() -> bool:
    enabled: bool = config.is_op_determinism_enabled()
    return not enabled


def _now(after: Sequence[Any]) -> Any:
    """The time once all of `after` is there."""
    tensors = [t for t in tf.nest.flatten(list(after), expand_composites=True) if tf.is_tensor(t)]
    with tf.control_dependencies(tensors), tf.device("/device:CPU:0"):
        return tf.timestamp()
