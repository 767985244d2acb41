"""Waiting times of a worker: for its input, and for other workers in collectives.

All workers take as long as the slowest one, which is the worker that waits the shortest time in the sum of
the gradients. Only durations on the clock of one worker are compared.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.tensorflow_patches import eager_context


class StepTimes:
    """Sums of waiting times in a variable, updated within the graph of the steps.

    If operations are deterministic, TensorFlow has no clock, and the sums are NaN.

    Args:
      first: Number of the first replica of this process. Its other replicas wait equally long.
    """

    def __init__(self, first: int):
        self._first = first
        with tf.device("/device:CPU:0"):
            self._secs = tf.Variable(tf.zeros([2], tf.float64), trainable=False, name="step_times")

    def total(self) -> np.ndarray:
        """Returns `[2]` float64: seconds spent waiting in collectives, and for input."""
        secs: np.ndarray = self._secs.numpy()
        return secs if _has_clock() else np.full(2, np.nan)

    def of_sum(self, inputs: Sequence[Any], exchange: Callable[[], Any], *, is_split: bool = False) -> Any:
        """Returns `exchange()`, and adds the seconds from the computation of `inputs` to its end.

        Args:
          inputs: Tensors that the exchange needs.
          exchange: Traces a collective.
          is_split: True if one operation sends the request and another one waits for the result. TensorFlow
            keeps stateful operations in the order of the program: a request after the clock was read would
            wait for all of `inputs`.
        """
        context = tf.distribute.get_replica_context()
        is_first = (
            context is None or int(tf.get_static_value(context.replica_id_in_sync_group)) == self._first
        )
        if not (is_first and _has_clock()):
            return exchange()
        start = None if is_split else _timestamp(inputs)
        result = exchange()
        start = _timestamp(inputs) if is_split else start
        self._add([_timestamp([result]) - start, 0.0])
        return result

    def of_input(self, take: Callable[[], Any]) -> Any:
        """Returns `take()`, which takes a batch, and adds its seconds."""
        if not _has_clock():
            return take()
        with tf.control_dependencies([start := _timestamp([])]):
            batch = take()
        self._add([0.0, _timestamp([batch]) - start])
        return batch

    def _add(self, secs: list) -> None:
        self._secs.assign_add(tf.stack([tf.cast(s, tf.float64) for s in secs]), read_value=False)


def _has_clock() -> bool:
    return not eager_context.is_op_determinism_enabled()


def _timestamp(dependencies: Sequence[Any]) -> Any:
    """Returns the time at which all dependencies are computed."""
    tensors = [t for t in tf.nest.flatten(list(dependencies), expand_composites=True) if tf.is_tensor(t)]
    with tf.control_dependencies(tensors), tf.device("/device:CPU:0"):
        return tf.timestamp()
