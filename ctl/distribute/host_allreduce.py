"""Small sums over workers outside of steps, for decisions that all workers take together.

Every worker must call the same method at the same step. TensorFlow does not detect different collectives
of equal shape and pairs them.
"""

from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute import collective_debug
from ctl.distribute.engine_all_reduce import engine_of
from ctl.distribute.strategies import topology_of
from ctl.distribute.topology import Topology


class HostAllReduce:
    """Sums of float64 vectors over the workers of a strategy. A no-op with one worker.

    Args:
      strategy: Strategy of the job.
      topology: Topology of the job. None: that of the strategy.
    """

    def __init__(self, strategy: tf.distribute.Strategy, topology: Topology | None = None):
        topology = topology_of(strategy) if topology is None else topology
        self._topology = topology
        self._strategy = strategy
        self._shares = topology.num_local_replicas
        self._function = tf.function(
            self._all_reduce, autograph=False, input_signature=[tf.TensorSpec([None], tf.float64)]
        )

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._topology.num_workers

    def sum(self, values: Any) -> np.ndarray:
        """Returns the sum of `values` `[n]` over the workers `[n]`, identical on all workers."""
        values = np.asarray(values, np.float64)
        if self.num_workers == 1:
            return values
        collective_debug.announce("agreement", list(values.shape), "float64")
        engine = engine_of(self._strategy)
        if engine is not None:
            return engine.sum("ctl.agreement", values)
        return self._function(tf.constant(values)).numpy()

    def _all_reduce(self, values: Any) -> Any:
        def share(v: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, v / self._shares)

        total = self._strategy.run(share, (values,))
        return self._strategy.experimental_local_results(total)[0]
