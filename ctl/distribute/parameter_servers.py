"""Roles of processes under parameter servers, and the strategy of the coordinating process.

The chief runs the trainer and holds no data. Workers compute steps asynchronously. Variables are placed on
the parameter servers. Workers and parameter servers only serve requests, and exit when the chief has ended;
TensorFlow's servers never exit.
"""

import logging
import math
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.distribute import own_port
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError
from ctl.io import log_filter
from ctl.io.rendezvous import split_address
from ctl.supervision import heartbeat, signals
from ctl.tensorflow_patches import strategy_attributes

WORD = "parameter_server"
_TYPES = ("chief", "worker", "ps")
_PROBE_SECS = 1.0
_REFUSALS = 4  # consecutive, before the chief counts as ended
_TELL_SECS = (5.0, 30.0)  # first log message about missing tasks: of the chief, of servers
_START_SECS = 600.0
_PARTITIONERS = "'min_size:256K', 'max_shards:2', 'max_shards:2,min_size:64K' or 'fixed_shards:2'"

_log = logging.getLogger("ctl")


def coordinator(strategy: tf.distribute.Strategy) -> Any:
    """Returns the `ClusterCoordinator` of a strategy, one per strategy."""
    return tf.distribute.coordinator.ClusterCoordinator(strategy)


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of processes that compute steps, without the chief."""
    return strategy_attributes.num_parameter_server_workers(strategy)


def connect_cluster(
    cluster: Topology, devices: Sequence[str] = (), variable_partitioner: str = ""
) -> tf.distribute.Strategy:
    """Returns the strategy on the chief when all tasks are up. Other tasks serve and raise SystemExit(0).

    Raises UsageError for an unsuitable cluster, PeerLostError if tasks do not start in time.
    """
    check_tasks(cluster, devices)
    own_port.check_port_is_free(cluster)
    partition = Partition.parse(variable_partitioner)
    if cluster.task_type != "chief":
        serve(cluster)
        raise SystemExit(0)
    tasks = {k: list(cluster.tasks[k]) for k in _TYPES}
    wait_for({f"{k} {i}": a for k in ("worker", "ps") for i, a in enumerate(tasks[k])})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(tasks), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    connecting = heartbeat.current.enter_phase(heartbeat.CONNECTING)
    with log_filter.quiet(), signals.default_action(), connecting:
        strategy = tf.distribute.ParameterServerStrategy(
            resolver, variable_partitioner=partition.partitioner(len(tasks["ps"]))
        )
    if strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"Each worker has {strategy.num_replicas_in_sync} GPUs; expected one with parameter servers. "
            "Start a worker per GPU, each with its own CUDA_VISIBLE_DEVICES."
        )
    coordinator(strategy)
    return strategy


def check_tasks(cluster: Topology, devices: Sequence[str] = ()) -> None:
    """Raises UsageError for an unsuitable cluster or task, and if `devices` are given."""
    if devices:
        raise UsageError(
            f"strategy {WORD!r} uses the device of each worker and got devices {', '.join(devices)}. "
            "Leave devices out; choose GPUs with CUDA_VISIBLE_DEVICES."
        )
    missing = [k for k in _TYPES if not cluster.tasks.get(k)]
    if missing:
        came = ", ".join(f"{len(v)} {k}" for k, v in cluster.tasks.items()) or "no tasks"
        raise UsageError(
            f"strategy {WORD!r} got a TF_CONFIG with {came}; expected one chief, workers and ps. Add "
            f'"{missing[0]}": ["host:port"] to its cluster, or write another strategy.'
        )
    if cluster.task_type not in _TYPES:
        raise UsageError(
            f"TF_CONFIG makes this process a {cluster.task_type!r}; expected 'chief', 'worker' or 'ps' "
            f"with strategy {WORD!r}."
        )


def serve(cluster: Topology) -> None:
    """Serves as a worker or a parameter server until the chief has started and ended."""
    tasks = {k: list(cluster.tasks[k]) for k in _TYPES}
    me, [chief] = f"{cluster.task_type} {cluster.task_index}", tasks["chief"]
    with log_filter.quiet():
        server = tf.distribute.Server(
            tf.train.ClusterSpec(tasks),
            job_name=cluster.task_type,
            task_index=cluster.task_index,
            protocol="grpc",
            start=True,
        )
    _log.info("Serving as %s at %s for the chief at %s.", me, cluster.address, chief)
    watch_chief(chief)
    _log.info("The chief at %s has ended; %s exits.", chief, me)
    del server


def watch_chief(
    chief: str,
    *,
    probe: Callable[[str], bool] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when the chief has accepted a connection and later refused several consecutive ones."""
    probe = probe or _answers
    started, has_connected, refusals, is_warned = clock(), False, 0, False
    while refusals < _REFUSALS:
        up = probe(chief)
        has_connected = has_connected or up
        refusals = 0 if up or not has_connected else refusals + 1
        if not has_connected and not is_warned and clock() - started > _TELL_SECS[1]:
            is_warned = True
            _log.warning("The chief at %s does not accept connections yet; still waiting.", chief)
        sleep(_PROBE_SECS)


def wait_for(
    addresses: dict[str, str],
    *,
    probe: Callable[[str], bool] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when all addresses (by task) accept connections. Logs the missing tasks.

    TensorFlow waits too, but without log messages, and Ctrl-C has no effect during its wait.
    """
    probe = probe or _answers
    started, tell_at, missing = clock(), _TELL_SECS[0], dict(addresses)
    while missing := {k: a for k, a in missing.items() if not probe(a)}:
        text = ", ".join(f"{k} at {a}" for k, a in missing.items())
        if clock() - started > _START_SECS:
            raise PeerLostError(f"Not started within {_START_SECS:.0f} s: {text}. See their logs.")
        if clock() - started > tell_at:
            tell_at += _TELL_SECS[1]
            _log.warning("Waiting for %s.", text)
        sleep(0.2)


def _answers(address: str) -> bool:
    try:
        with socket.create_connection(split_address(address), timeout=2.0):
            return True
    except OSError:
        return False


@dataclass(frozen=True)
class Partition:
    """Partition of large variables over parameter servers along their first axis.

    Attributes:
      fixed_shards: Number of shards of every variable. 0: determined by the size.
      max_shards: Maximum number of shards of one variable. 0: the number of parameter servers.
      min_bytes: Minimum size of a shard (bytes).
    """

    fixed_shards: int = 0
    max_shards: int = 0
    min_bytes: int = 0

    @staticmethod
    def parse(text: str) -> "Partition":
        """Parses text such as "min_size:256K" or "max_shards:2,min_size:64K". "" means no partition."""
        options: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            match = re.fullmatch(r"(fixed_shards|max_shards|min_size):(\d+)([KMG]?)", part.strip())
            if not match or not int(match[2]) or (match[3] and match[1] != "min_size"):
                raise UsageError(
                    f"variable_partitioner is {text!r}; expected {_PARTITIONERS} (K, M, G are bytes "
                    "times 1024, 1024², 1024³), or nothing."
                )
            options[match[1]] = int(match[2]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[3]]
        if len(options) > 1 and "fixed_shards" in options:
            raise UsageError(
                f"variable_partitioner is {text!r}, but fixed_shards excludes other options; expected "
                f"{_PARTITIONERS}."
            )
        fields = (options.get(name, 0) for name in ("fixed_shards", "max_shards", "min_size"))
        return Partition(*fields)

    def partitioner(self, num_servers: int) -> Any:
        """Returns TensorFlow's partitioner, or None."""
        library = tf.distribute.experimental.partitioners
        if self.fixed_shards:
            return library.FixedShardsPartitioner(num_shards=self.fixed_shards)
        if not (self.max_shards or self.min_bytes):
            return None
        return library.MinSizePartitioner(
            min_shard_bytes=self.min_bytes or 256 << 10, max_shards=self.max_shards or num_servers
        )


def closures(steps: int, per_closure: int | None, workers: int) -> tuple[int, int]:
    """Returns (number of calls, maximum steps per call) for `steps` steps, at least one call per worker."""
    length = min(steps, per_closure or steps)
    return max(min(workers, steps), math.ceil(steps / length)), length
