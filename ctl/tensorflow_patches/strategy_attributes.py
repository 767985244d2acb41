"""Private attributes of tf.distribute strategies.

Purpose: A strategy does not export its number of workers.
Uses: `tf.distribute.ParameterServerStrategy._num_workers` and
  `tf.distribute.StrategyExtended._in_multi_worker_mode`.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known.
Switch: none, as these are reads and calls.
"""

from typing import Any


def num_parameter_server_workers(strategy: Any) -> int:
    """Returns the number of workers of a parameter server strategy, without the coordinator."""
    count: int = strategy._num_workers
    return count


def has_several_workers(strategy: Any) -> bool:
    """Returns True for a strategy of several processes."""
    return bool(strategy.extended._in_multi_worker_mode())
