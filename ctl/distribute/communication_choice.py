"""Choice of the communication path for `communication="auto"` on CPUs.

Sums as large as the model's gradients are timed over TensorFlow's ring and over the engine. All workers
keep the faster path, the same one. A resumed run keeps the path of its checkpoint: with three workers or
more the other path adds numbers in another order.
"""

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.collectives.engine import Engine
from ctl.distribute import engine_all_reduce
from ctl.distribute.engine_all_reduce import PeerLimits
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError

_log = logging.getLogger("ctl")
_ROUNDS = 5
_ENOUGH_SECS = 1.0  # of sums, total of all rounds
_CALLS = 4  # consecutive, without a pause, as in steps
PATHS = ("ring", "tcp")
_measured_paths: weakref.WeakKeyDictionary[Any, dict[tuple, str]] = weakref.WeakKeyDictionary()

Sum = Callable[[Sequence[tf.Tensor]], Any]


def choose_communication(
    strategy: tf.distribute.Strategy,
    topology: Topology,
    tensors: Sequence[tf.TensorSpec],
    summed: Sum,
    *,
    restored_path: str = "",
    limits: PeerLimits = PeerLimits(),  # noqa: B008  immutable
) -> str:
    """Installs the faster path in the strategy. An engine that is installed already stays.

    Args:
      strategy: Strategy of the job.
      topology: Topology of the job.
      tensors: Shapes and dtypes of the gradients of a step.
      summed: Function that sums such tensors over replicas, called in replica context.
      restored_path: Path of the restored checkpoint, equal on all workers, which is not measured again. An
        empty string means none.
      limits: Timeouts of the engine.

    Returns:
      One of `PATHS`, or an empty string where the strategy cannot use the engine.

    Raises:
      PeerLostError: If a worker is lost during the measurement.

    All workers call it at the same time.
    """
    if not engine_all_reduce.can_use_engine(strategy):
        return ""
    if engine_all_reduce.engine_of(strategy) is not None:
        return "tcp"
    sizes = tuple((tuple(spec.shape), spec.dtype.name) for spec in tensors)
    measured = _measured_paths.setdefault(strategy, {})
    path = restored_path or measured.get(sizes, "")
    if path == "ring":
        return path
    try:
        engine = engine_all_reduce.connect_engine(topology, limits)
    except (PeerLostError, UsageError) as e:
        if topology.is_chief:
            _log.warning("%s Sums use TensorFlow's ring.", e)
        return "ring"
    if path == "tcp" or _is_faster(strategy, topology, engine, tensors, summed):
        engine_all_reduce.install_engine(strategy, engine)
        measured[sizes] = "tcp"
    else:
        engine_all_reduce.install_engine(strategy, None)
        engine.close()
        measured[sizes] = "ring"
    return measured[sizes]


def _is_faster(
    strategy: tf.distribute.Strategy,
    topology: Topology,
    engine: Engine,
    tensors: Sequence[tf.TensorSpec],
    summed: Sum,
) -> bool:
    """Returns True if the engine is faster than the ring on the slowest worker. The chief logs it."""
    times = _measured(strategy, engine, tensors, summed)
    faster = min(PATHS, key=lambda path: times[path])
    if topology.is_chief:
        message = "communication: tcp %.3g ms, ring %.3g ms per step -> %s"
        _log.info(message, 1e3 * times["tcp"], 1e3 * times["ring"], faster)
    return faster == "tcp"


def _measured(
    strategy: tf.distribute.Strategy, engine: Engine, tensors: Sequence[tf.TensorSpec], summed: Sum
) -> dict[str, float]:
    """Returns the median duration of a sum by path, of the slowest worker (seconds).

    Workers start the first of several sums at different times. A late worker finds the messages of its
    peers and hardly waits. Only consecutive sums take as long as the sums of steps.
    """
    functions = []
    for path in PATHS:
        engine_all_reduce.install_engine(strategy, engine if path == "tcp" else None)
        functions.append(_function(strategy, tensors, summed))
        functions[-1]()
    once = _slowest(engine, list(map(_seconds, functions)))
    calls = _CALLS if _CALLS * once.sum() < _ENOUGH_SECS else 1
    medians = _medians(engine, lambda: [_seconds(function, calls) for function in functions])
    return dict(zip(PATHS, medians, strict=True))


def _medians(engine: Engine, measure: Callable[[], list[float]]) -> list[float]:
    """Returns medians of repeated measurements, each that of the slowest worker."""
    rounds: list[np.ndarray] = []
    while len(rounds) < _ROUNDS and np.sum(rounds) < _ENOUGH_SECS:
        rounds.append(_slowest(engine, measure()))
    return np.median(rounds, axis=0).tolist()


def _slowest(engine: Engine, numbers: Sequence[float]) -> np.ndarray:
    """Returns the element-wise maximum over all workers. All workers call it."""
    table = np.zeros((engine.ranks.size, len(numbers)))
    table[engine.ranks.rank] = numbers
    return np.reshape(engine.sum("ctl.communication", table.ravel()), table.shape).max(axis=0)


def _seconds(function: Callable[[], Any], calls: int = 1) -> float:
    """Returns the mean duration of consecutive calls (seconds)."""
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) / calls


def _function(
    strategy: tf.distribute.Strategy, tensors: Sequence[tf.TensorSpec], summed: Sum
) -> Callable[[], Any]:
    values = [tf.zeros(spec.shape, spec.dtype) for spec in tensors]

    def replica(inputs: Sequence[tf.Tensor]) -> Any:
        sums = summed([tf.identity(t) for t in inputs])
        return tf.add_n([tf.cast(tf.reshape(total, [-1])[:1], tf.float32) for total in sums])

    function = tf.function(lambda *inputs: strategy.run(replica, (inputs,)), autograph=False)
    concrete = function.get_concrete_function(*values)
    return lambda: concrete(*values).numpy()  # reads all sums, as a step does
