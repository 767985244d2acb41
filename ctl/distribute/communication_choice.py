"""`communication="auto"` on CPUs: sums as large as the model's gradients are timed on both paths.

The workers keep the faster path, all the same one. A run that goes on keeps the path of its checkpoint:
with three workers or more the two paths add numbers in other orders.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.collectives.engine import Engine
from ctl.distribute import engine_all_reduce
from ctl.distribute.engine_all_reduce import PeerLimits
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError

_log = logging.getLogger("ctl")
_ROUNDS = 7
_ENOUGH_SECS = 1.0  # of sums, all rounds together
PATHS = ("ring", "tcp")

Sum = Callable[[Sequence[tf.Tensor]], Any]


def choose_communication(
    strategy: tf.distribute.Strategy,
    topology: Topology,
    tensors: Sequence[tf.TensorSpec],
    summed: Sum,
    *,
    known: str = "",
    limits: PeerLimits = PeerLimits(),  # noqa: B008  never changes
) -> str:
    """Installs the faster of `PATHS` in the strategy, and returns it; "" where there is no choice.

    Args:
      tensors: what is summed in each step; `summed` sums such tensors, in a replica.
      known: one of `PATHS` that need not be measured again, equal on all workers.

    All workers call it at the same time. Raises PeerLostError where a worker is lost meanwhile.
    """
    if not engine_all_reduce.can_use_engine(strategy) or engine_all_reduce.engine_of(strategy):
        return ""
    sizes = tuple((tuple(spec.shape), spec.dtype.name) for spec in tensors)
    measured: dict[tuple, str] = strategy.__dict__.setdefault("_ctl_measured", {})
    known = known or measured.get(sizes, "")
    if known == "ring":
        return known
    try:
        engine = engine_all_reduce.connect_engine(topology, limits)
    except PeerLostError as e:
        if topology.is_chief:
            _log.warning("%s It stays with TensorFlow's ring.", e)
        return "ring"
    if known == "tcp":
        engine_all_reduce.install_engine(strategy, engine)
        return known
    times = _measured(strategy, engine, tensors, summed)
    faster = min(PATHS, key=lambda path: times[path])
    if topology.is_chief:
        _log.info(
            "communication: tcp %.3g ms, ring %.3g ms per step -> %s",
            1e3 * times["tcp"],
            1e3 * times["ring"],
            faster,
        )
    engine_all_reduce.install_engine(strategy, engine if faster == "tcp" else None)
    measured[sizes] = faster
    if faster != "tcp":
        engine.close()
    return faster


def _measured(
    strategy: tf.distribute.Strategy, engine: Engine, tensors: Sequence[tf.TensorSpec], summed: Sum
) -> dict[str, float]:
    """Median seconds of a sum by path, means over the workers."""
    functions = {}
    for path in PATHS:
        engine_all_reduce.install_engine(strategy, engine if path == "tcp" else None)
        functions[path] = _function(strategy, tensors, summed)
        functions[path]()
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    for _ in range(_ROUNDS):
        for path, function in functions.items():
            started = time.perf_counter()
            function()
            found[path].append(time.perf_counter() - started)
        mine = np.array([seconds[-1] for seconds in found.values()])
        mean = engine.sum("ctl.communication", mine) / engine.place.size
        for seconds, value in zip(found.values(), mean, strict=True):
            seconds[-1] = float(value)
        if sum(map(sum, found.values())) > _ENOUGH_SECS:
            break
    return {path: statistics.median(seconds) for path, seconds in found.items()}


def _function(
    strategy: tf.distribute.Strategy, tensors: Sequence[tf.TensorSpec], summed: Sum
) -> Callable[[], Any]:
    values = [tf.zeros(spec.shape, spec.dtype) for spec in tensors]

    def replica(given: Sequence[tf.Tensor]) -> Any:
        return tf.add_n(
            [
                tf.cast(tf.reduce_sum(total[:1]), tf.float32)
                for total in summed([tf.identity(t) for t in given])
            ]
        )

    function = tf.function(lambda given: strategy.run(replica, (given,)), autograph=False)
    concrete = function.get_concrete_function(values)
    return lambda: concrete(*values).numpy()
