"""Values that differ between workers, in checkpoints, such as the state of optimizers with `--sync_every`.

state.gather()     # before a save: the variables hold the rows of all workers
state.release()    # after a save: the variables are empty
state.scatter()    # after a restore: each worker loads its row, or the mean if their number has changed
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.topology import Topology


class WorkerState:
    """Values of variables on every worker, flattened to one row per worker.

    Args:
      strategy: Strategy of the job.
      topology: Topology of the job.
      sources: Variables of the strategy. Variables that hold no numbers are left out.

    Attributes:
      variables: One variable `[num_workers or 0, n]` for each dtype, for checkpoint managers.
      num_workers: Number of workers of this job.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, topology: Topology, sources: Sequence[tf.Variable]
    ):
        self._strategy, self._topology, self.num_workers = strategy, topology, topology.num_workers
        self._sources: dict[tf.DType, list[tf.Variable]] = {}
        for variable in sources:
            if variable.dtype.is_floating or variable.dtype.is_integer:
                self._sources.setdefault(_gathered_dtype(variable.dtype), []).append(variable)
        self.variables: list[tf.Variable] = []
        with tf.device("/cpu:0"):
            for dtype, variables in self._sources.items():
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
        """Copies the values of all workers to the variables. All workers call it at the same step."""
        if self._function is None:
            self._function = tf.function(self._gathered, autograph=False).get_concrete_function()
        for variable, rows in zip(self.variables, self._function(), strict=True):
            variable.assign(rows)

    def release(self) -> None:
        """Frees the memory of the variables."""
        for variable in self.variables:
            variable.assign(variable[:0])

    def scatter(self) -> int:
        """Loads this worker's row from the variables, and frees their memory.

        If the number of workers has changed, floating-point values become the mean over the saved rows, and
        integers keep their current values.

        Returns:
          Number of saved rows, 0 if none was restored.
        """
        num_rows = 0
        for variable, sources in zip(self.variables, self._sources.values(), strict=True):
            rows = variable.numpy()
            num_rows = max(num_rows, len(rows))
            if len(rows) == self.num_workers:
                self._assign(sources, rows[self._topology.worker_index])
            elif len(rows) and variable.dtype.is_floating:
                self._assign(sources, np.asarray(np.mean(rows, axis=0, dtype=np.float64)))
        self.release()
        return num_rows

    def _assign(self, sources: Sequence[tf.Variable], flat: np.ndarray) -> None:
        start = 0
        for variable in sources:
            local, size = self._local(variable), variable.shape.num_elements()
            local.assign(tf.cast(flat[start : start + size].reshape(variable.shape), local.dtype))
            start += size

    def _gathered(self) -> list[tf.Tensor]:
        flat = [
            tf.concat([tf.reshape(tf.cast(self._local(v), dtype), [1, -1]) for v in sources], axis=1)
            for dtype, sources in self._sources.items()
        ]
        if self.num_workers == 1:
            return flat

        def joined(*rows: tf.Tensor) -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            return [context.all_gather(tf.identity(row), axis=0) for row in rows]

        results = self._strategy.run(joined, args=tuple(flat))
        return [self._strategy.experimental_local_results(rows)[0] for rows in results]

    def _local(self, variable: tf.Variable) -> tf.Variable:
        local: tf.Variable = self._strategy.experimental_local_results(variable)[0]
        return local


def variable_like(variable: tf.Variable, name: str) -> tf.Variable:
    """Creates a variable of zeros of the same shape, on the same device, outside of any strategy."""
    device = tf.DeviceSpec.from_string(variable.device)
    variable_name = variable.name.partition(":")[0]
    with tf.device(f"/device:{device.device_type or 'CPU'}:{device.device_index or 0}"):
        return tf.Variable(tf.zeros_like(variable), trainable=False, name=f"{name}/{variable_name}")


def _gathered_dtype(dtype: tf.DType) -> tf.DType:
    """Returns a type that TensorFlow can gather."""
    if dtype.is_integer:
        return tf.int64
    return tf.float64 if dtype == tf.float64 else tf.float32
