"""`communication="auto"` on CPUs: sums as large as the model's gradients are timed on both paths.

The workers keep the faster path, all the same one, and measure in which parts gradients are worth a sum
of their own. A run that goes on keeps the path and the parts of its checkpoint: with three workers or more
others add numbers in another order.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from ctl.collectives.engine import Engine
from ctl.distribute import engine_all_reduce
from ctl.distribute.engine_all_reduce import PeerLimits
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError

_log = logging.getLogger("ctl")
_ROUNDS = 5
_ENOUGH_SECS = 1.0  # of sums, all rounds together
_CALLS = 4  # that follow each other without a pause, as steps do
PATHS = ("ring", "tcp")
_BUSY = 0.5
_LATENCIES = 20  # one more collective may cost a twentieth of what it carries
_LEAST_BUCKET, _PROBE = 1 << 18, 1 << 22  # bytes

Sum = Callable[[Sequence[tf.Tensor]], Any]


class Path(NamedTuple):
    """What sums travel over: one of `PATHS`, or "" where there is no choice; and in which parts.

    `bucket_bytes`: of gradients that are summed together over "tcp"; 0: all of them.
    """

    word: str = ""
    bucket_bytes: int = 0


def choose_communication(
    strategy: tf.distribute.Strategy,
    topology: Topology,
    tensors: Sequence[tf.TensorSpec],
    summed: Sum,
    *,
    wire_bytes: int,
    known: Path = Path(),  # noqa: B008  never changes
    limits: PeerLimits = PeerLimits(),  # noqa: B008
) -> Path:
    """Installs the faster of `PATHS` in the strategy, and returns it; an engine that is there stays.

    Args:
      tensors: what is summed in each step; `summed` sums such tensors, in a replica.
      wire_bytes: what they are when they travel.
      known: a path that need not be measured again, equal on all workers.

    All workers call it at the same time. Raises PeerLostError where a worker is lost meanwhile.
    """
    if not engine_all_reduce.can_use_engine(strategy):
        return Path()
    sizes = tuple((tuple(spec.shape), spec.dtype.name) for spec in tensors)
    measured: dict[tuple, Path] = strategy.__dict__.setdefault("_ctl_measured", {})
    known = known if known.word else measured.get(sizes, Path())
    engine = engine_all_reduce.engine_of(strategy)
    if engine is None:
        if known.word == "ring":
            return known
        try:
            engine = engine_all_reduce.connect_engine(topology, limits)
        except (PeerLostError, UsageError) as e:
            if topology.is_chief:
                _log.warning("%s Sums use TensorFlow's ring.", e)
            return Path("ring")
        if not known.word and not _is_faster(strategy, topology, engine, tensors, summed):
            engine_all_reduce.install_engine(strategy, None)
            engine.close()
            measured[sizes] = Path("ring")
            return measured[sizes]
    if known.word != "tcp":
        known = Path("tcp", _measured_bucket(engine, wire_bytes))
        if known.bucket_bytes and topology.is_chief:
            _log.info("communication: gradients in buckets of %d KB", known.bucket_bytes >> 10)
    engine_all_reduce.install_engine(strategy, engine, known.bucket_bytes)
    measured[sizes] = known
    return known


def _is_faster(
    strategy: tf.distribute.Strategy,
    topology: Topology,
    engine: Engine,
    tensors: Sequence[tf.TensorSpec],
    summed: Sum,
) -> bool:
    """Whether the engine is faster than the ring, on all workers together; the chief says so."""
    times = _measured(strategy, engine, tensors, summed)
    faster = min(PATHS, key=lambda path: times[path])
    if topology.is_chief:
        words = "communication: tcp %.3g ms, ring %.3g ms per step -> %s"
        _log.info(words, 1e3 * times["tcp"], 1e3 * times["ring"], faster)
    return faster == "tcp"


def _measured_bucket(engine: Engine, wire_bytes: int) -> int:
    """The bucket for sums of `wire_bytes` over these connections; the same on all workers."""
    if wire_bytes < 2 * _LEAST_BUCKET:
        return 0
    nothing, much = np.zeros(1, np.float32), np.zeros(min(wire_bytes, _PROBE) // 4, np.float32)

    def measure() -> list[float]:
        latency = _seconds(lambda: engine.sum("ctl.probe.latency", nothing))
        busy = time.process_time()
        whole = _seconds(lambda: engine.sum("ctl.probe.bandwidth", much))
        return [latency, whole, time.process_time() - busy]

    latency, whole, busy = _medians(engine, measure)
    return best_bucket(wire_bytes, latency, much.nbytes / max(whole - latency, 1e-9), busy / whole)


def best_bucket(wire_bytes: int, latency: float, bandwidth: float, busy: float) -> int:
    """Bytes that are worth a collective of their own, a power of two; 0: two would not be worth it.

    Args:
      wire_bytes: of all gradients.
      latency: seconds of a sum of nothing.
      bandwidth: bytes per second of a sum of much.
      busy: share of that time in which the processor works: backward would have to wait for it.
    """
    worth = max(_LATENCIES * latency * bandwidth, _LEAST_BUCKET)
    bucket = 2 ** int(math.log2(worth))
    return 0 if busy > _BUSY or 2 * bucket > wire_bytes else bucket


def _measured(
    strategy: tf.distribute.Strategy, engine: Engine, tensors: Sequence[tf.TensorSpec], summed: Sum
) -> dict[str, float]:
    """Median seconds of a sum by path, of the slowest worker.

    Workers enter the first of several sums at different times. One that enters late finds the messages of
    its peers and hardly waits, so only sums that follow each other take as long as those of steps.
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
    table = np.zeros((engine.place.size, len(numbers)))
    table[engine.place.rank] = numbers
    return np.reshape(engine.sum("ctl.communication", table.ravel()), table.shape).max(axis=0)


def _seconds(function: Callable[[], Any], calls: int = 1) -> float:
    """Returns the mean seconds of calls that follow each other."""
    started = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - started) / calls


def _function(
    strategy: tf.distribute.Strategy, tensors: Sequence[tf.TensorSpec], summed: Sum
) -> Callable[[], Any]:
    values = [tf.zeros(spec.shape, spec.dtype) for spec in tensors]

    def replica(given: Sequence[tf.Tensor]) -> Any:
        sums = summed([tf.identity(t) for t in given])
        return tf.add_n([tf.cast(tf.reshape(total, [-1])[:1], tf.float32) for total in sums])

    function = tf.function(lambda *given: strategy.run(replica, (given,)), autograph=False)
    concrete = function.get_concrete_function(*values)
    return lambda: concrete(*values).numpy()  # reads all sums, as a step does
