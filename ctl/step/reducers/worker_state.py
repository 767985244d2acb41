"""What differs between workers, in a checkpoint: such as the state of optimizers with `--sync_every`.

state.gather()     # all workers: the variables hold the rows of all, to be saved
state.release()    # they are empty again
state.scatter()    # after a restore: each worker takes its row; or the mean, of another number of workers
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.topology import Topology


class WorkerState:
    """The values of `kept` on every worker, flat, one row per worker.

    Args:
      kept: variables of the strategy; numbers only.

    Attributes:
      variables: a variable `[workers or 0, n]` for each dtype, which any checkpoint manager keeps.
      num_workers: how many there are now.
    """

    def __init__(self, strategy: tf.distribute.Strategy, topology: Topology, kept: Sequence[tf.Variable]):
        self._strategy, self._topology, self.num_workers = strategy, topology, topology.num_workers
        self._kept: dict[tf.DType, list[tf.Variable]] = {}
        for variable in kept:
            if variable.dtype.is_floating or variable.dtype.is_integer:
                self._kept.setdefault(_sent_as(variable.dtype), []).append(variable)
        self.variables: list[tf.Variable] = []
        with tf.device("/cpu:0"):
            for dtype, variables in self._kept.items():
                size = sum(v.shape.num_elements() for v in variables)
                self.variables.append(
                    tf.Variable(
                        tf.zeros([0, size], dtype),
                        trainable=False,
                        name=f"state_{dtype.name}",
                        shape=tf.TensorShape([None, size]),
                    )
                )
        self._function: Any = None

    def gather(self) -> None:
        """Every worker's values into the variables; all workers call it at the same step."""
        if self._function is None:
            self._function = tf.function(self._gathered, autograph=False).get_concrete_function()
        for variable, rows in zip(self.variables, self._function(), strict=True):
            variable.assign(rows)

    def release(self) -> None:
        """Frees the memory of what `gather` or a restore has put there."""
        for variable in self.variables:
            variable.assign(variable[:0])

    def scatter(self) -> int:
        """This worker's values out of the variables, which are empty then; returns the rows there were.

        With another number of workers than now: the mean, and whole numbers as they are.
        """
        rows = 0
        for variable, kept in zip(self.variables, self._kept.values(), strict=True):
            found = variable.numpy()
            rows = max(rows, len(found))
            if len(found) == self.num_workers:
                self._assign(kept, found[self._topology.worker_index])
            elif len(found) and variable.dtype.is_floating:
                self._assign(kept, np.asarray(np.mean(found, axis=0, dtype=np.float64)))
        self.release()
        return rows

    def _assign(self, kept: Sequence[tf.Variable], flat: np.ndarray) -> None:
        start = 0
        for variable in kept:
            here, size = self._here(variable), variable.shape.num_elements()
            here.assign(tf.cast(flat[start : start + size].reshape(variable.shape), here.dtype))
            start += size

    def _gathered(self) -> list[tf.Tensor]:
        flat = [
            tf.concat([tf.reshape(tf.cast(self._here(v), dtype), [1, -1]) for v in kept], axis=1)
            for dtype, kept in self._kept.items()
        ]
        if self.num_workers == 1:
            return flat

        def joined(*rows: tf.Tensor) -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            return [context.all_gather(tf.identity(row), axis=0) for row in rows]

        found = self._strategy.run(joined, args=tuple(flat))
        return [self._strategy.experimental_local_results(rows)[0] for rows in found]

    def _here(self, variable: tf.Variable) -> tf.Variable:
        found: tf.Variable = self._strategy.experimental_local_results(variable)[0]
        return found


def variable_like(variable: tf.Variable, name: str) -> tf.Variable:
    """A variable of zeros of the same shape, on the same device, of no strategy."""
    device = tf.DeviceSpec.from_string(variable.device)
    word = variable.name.partition(":")[0]
    with tf.device(f"/device:{device.device_type or 'CPU'}:{device.device_index or 0}"):
        return tf.Variable(tf.zeros_like(variable), trainable=False, name=f"{name}/{word}")


def _sent_as(dtype: tf.DType) -> tf.DType:
    """A type that TensorFlow can gather."""
    if dtype.is_integer:
        return tf.int64
    return tf.float64 if dtype == tf.float64 else tf.float32
