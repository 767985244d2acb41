"""Creation of `tf.distribute` strategies by name.

default           no distribution: one device, lowest overhead
one_device        the same with OneDeviceStrategy, on a given device
mirrored          all (or the given) devices of this machine, synchronous
multi_worker      all processes of TF_CONFIG, synchronous
parameter_server  workers of TF_CONFIG, asynchronous; the variables are placed on its `ps` tasks
central_storage   several devices of this machine, the variables on one of them
tpu               the cores of a TPU, synchronous
auto              parameter_server if TF_CONFIG lists `ps`, multi_worker if it names several processes,
                  tpu if the environment names one, mirrored if there are several devices, else default
"""

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from ctl.distribute import communication as communication_lib
from ctl.distribute import devices as devices_lib
from ctl.distribute import engine_all_reduce, mpi_cluster, parameter_servers, strategy_factories
from ctl.distribute.engine_all_reduce import PeerLimits
from ctl.distribute.platforms import detection
from ctl.distribute.strategy_kind import StrategyKind, has_parameter_servers, kind_of
from ctl.distribute.topology import TRAINING_TYPES, Topology
from ctl.errors import UsageError
from ctl.io import log_filter
from ctl.setting_values import check_type

# the topology from which a strategy was created
_topologies: weakref.WeakKeyDictionary[Any, Topology] = weakref.WeakKeyDictionary()
STRATEGY_NAMES = (
    "auto",
    "default",
    "one_device",
    "mirrored",
    "multi_worker",
    parameter_servers.WORD,
    "central_storage",
    "tpu",
)


def make_strategy(
    name: str = "auto",
    *,
    devices: Sequence[str] = (),
    num_virtual_devices: int = 0,
    cross_device_ops: str = "auto",
    communication: str = "auto",
    timeout_secs: float = 0.0,
    heartbeat_secs: float = 0.0,
    tpu: str = "",
    variable_partitioner: str = "",
    startup_timeout_secs: float | None = None,
    flags: Mapping[str, Any] | None = None,
    topology: Topology | None = None,
) -> tf.distribute.Strategy:
    """Returns a strategy. With several workers, blocks until all have connected.

    Args:
      name: One of `STRATEGY_NAMES`.
      devices: Names such as "cpu:0" or "gpu:1". Empty for the strategy's default.
      num_virtual_devices: Number of logical CPUs. TensorFlow must not have started. 0 keeps one.
      cross_device_ops: All-reduce of mirrored; see docs/flags.md.
      communication: All-reduce of multi_worker; see docs/flags.md.
      timeout_secs: Timeout of one collective of multi_worker (seconds). 0: none.
      heartbeat_secs: Silence after which multi_worker considers a worker lost (seconds).
      tpu: Name or address of the TPU.
      variable_partitioner: Partitioner for parameter servers, such as "min_size:256K".
      startup_timeout_secs: Timeout for the other workers. None: the launcher's value, or 600.
      flags: Flag name -> value, equal on all workers.
      topology: Topology of the job. None reads the environment.

    Workers and servers of "parameter_server" serve until the chief has ended and raise SystemExit(0).
    Raises UsageError for an unknown name, an invalid TF_CONFIG or workers that differ, PeerLostError for a
    worker that does not connect in time.
    """
    _check_name(name)
    check_type("devices", devices, Sequence[str])
    check_type("topology", topology, Topology | None)
    mpi_cluster.join_if_requested(communication)
    cluster = topology or detection.read_topology()
    if cluster.evaluates:  # on its own devices
        return with_topology(_private(), cluster)
    if num_virtual_devices:
        devices_lib.split_cpu(num_virtual_devices)
    name = _choose(cluster, devices) if name == "auto" else name
    _check_options(
        name, cross_device_ops=cross_device_ops, communication=communication, tpu=tpu,
        timeout_secs=timeout_secs, heartbeat_secs=heartbeat_secs, variable_partitioner=variable_partitioner,
    )  # fmt: skip
    if name == parameter_servers.WORD:
        strategy = parameter_servers.connect_cluster(cluster, devices, variable_partitioner)
        return with_topology(strategy, cluster)
    _check_cluster(name, cluster)
    if name != "multi_worker":
        strategy = _create_local_strategy(name, devices, num_virtual_devices, cross_device_ops, tpu)
        return with_topology(strategy, cluster)
    options = communication_lib.options(communication, timeout_secs)
    waits = heartbeat_secs, startup_timeout_secs
    strategy = strategy_factories.multi_worker(
        cluster, devices, num_virtual_devices, options, *waits, flags
    )
    if communication in engine_all_reduce.ENGINE_COMMUNICATIONS:
        limits = PeerLimits(heartbeat_secs, timeout_secs)
        engine_all_reduce.use_engine(strategy, cluster, limits, communication)
    return with_topology(strategy, cluster)


def with_topology(strategy: tf.distribute.Strategy, topology: Topology) -> tf.distribute.Strategy:
    """Stores the topology of a strategy for `topology_of`, and returns the strategy."""
    if kind_of(strategy) is not StrategyKind.DEFAULT:  # the default strategy is a singleton of TensorFlow
        _topologies[strategy] = topology
    return strategy


def _create_local_strategy(
    name: str, devices: Sequence[str], num_virtual_devices: int, cross_device_ops: str, tpu: str
) -> tf.distribute.Strategy:
    names = [devices_lib.device(d) for d in devices]
    if name == "mirrored":
        return strategy_factories.mirrored(names, num_virtual_devices, cross_device_ops)
    if name == "central_storage":
        return strategy_factories.central_storage(names, num_virtual_devices)
    return strategy_factories.tpu(tpu) if name == "tpu" else strategy_factories.single(name, names)


def local(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """Returns the strategy for work within this process: with parameter servers, the default one."""
    return tf.distribute.get_strategy() if has_parameter_servers(strategy) else strategy


def counter_scope(strategy: tf.distribute.Strategy, *, is_compiled: bool) -> Any:
    """Returns the scope of the step counter.

    It is host memory or the parameter servers. With XLA it is the device of the only replica, because a
    compiled program cannot use variables of another device.
    """
    if has_parameter_servers(strategy):
        return strategy.scope()
    if not is_compiled or strategy.num_replicas_in_sync > 1:
        return tf.device("/cpu:0")
    is_default = kind_of(strategy) is StrategyKind.DEFAULT
    return tf.device(devices_lib.best_device() if is_default else strategy.extended.worker_devices[0])


def _check_name(name: str) -> None:
    """Raises UsageError for an unknown strategy. Initializes the list of physical devices."""
    if name not in STRATEGY_NAMES:
        raise UsageError(f"strategy is {name!r}; expected one of {', '.join(STRATEGY_NAMES)}.")
    with log_filter.quiet():  # the first search for GPUs logs warnings if there is none
        tf.config.list_physical_devices()


def _choose(cluster: Topology, devices: Sequence[str]) -> str:
    """Returns the name of the strategy for "auto"."""
    if "ps" in cluster.tasks:
        return parameter_servers.WORD
    if cluster.num_workers > 1:
        return "multi_worker"
    if os.environ.get("TPU_NAME") and not devices:
        return "tpu"
    gpus = tf.config.list_logical_devices("GPU")
    count = len(devices) or len(gpus) or len(tf.config.list_logical_devices("CPU"))
    return "mirrored" if count > 1 else "default"


def _check_cluster(name: str, cluster: Topology) -> None:
    if cluster.task_type == "ps":
        raise UsageError(
            f"TF_CONFIG makes this process a {cluster.task_type!r}; expected 'chief' or 'worker'."
        )
    if name != "multi_worker" and cluster.num_workers > 1:
        better = parameter_servers.WORD if "ps" in cluster.tasks else "multi_worker"
        raise UsageError(
            f"strategy is {name!r}, but TF_CONFIG names {cluster.num_workers} workers, and each would "
            f"train separately. Write strategy {better!r} or 'auto', or unset TF_CONFIG."
        )


def _private() -> tf.distribute.Strategy:
    """Returns the strategy of an evaluator, on its own GPUs if it has several, without the cluster."""
    several = len(tf.config.list_logical_devices("GPU")) > 1
    return strategy_factories.mirrored([]) if several else tf.distribute.get_strategy()


_BELONGS_TO = {
    "cross_device_ops": "mirrored",
    "communication": "multi_worker",
    "timeout_secs": "multi_worker",
    "heartbeat_secs": "multi_worker",
    "tpu": "tpu",
    "variable_partitioner": parameter_servers.WORD,
}


def _check_options(strategy_name: str, **options: Any) -> None:
    """Raises UsageError for arguments that belong to another strategy."""
    for name, value in options.items():
        if value not in ("auto", "", 0) and strategy_name != _BELONGS_TO[name]:
            raise UsageError(
                f"{name}={value!r} belongs to strategy {_BELONGS_TO[name]!r}, and the strategy is "
                f"{strategy_name!r}. Leave it out."
            )


@contextlib.contextmanager
def scope(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Enters `strategy.scope()`. Steps can update plain variables of the scope under any strategy.

    Central storage rejects an update in replica context without an aggregation. The values of these updates
    are equal on all replicas, so the scope selects the value of the first replica.
    """
    with strategy.scope():
        if kind_of(strategy) is not StrategyKind.CENTRAL_STORAGE:
            yield
            return

        def creator(next_creator: Any, **options: Any) -> Any:
            none = tf.VariableAggregation.NONE
            if options.get("aggregation") in (None, none):
                options["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
            return next_creator(**options)

        with tf.variable_creator_scope(creator):
            yield


def topology_of(strategy: tf.distribute.Strategy) -> Topology:
    """Returns the topology with the replicas of a strategy object.

    A strategy of `make_strategy` stores its topology. For other strategies the environment is read.
    """
    stored = _topologies.get(strategy) or detection.read_topology()
    if stored.is_elastic:
        return stored
    replicas = strategy.num_replicas_in_sync
    alone = replace(stored, tasks={}, task_index=0, num_replicas=replicas, num_local_replicas=replicas)
    if stored.evaluates:
        return alone
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec().as_dict() if resolver else {}
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or not spec:
        return replace(alone, task_type="worker")
    tasks = {k: tuple(v) for k, v in spec.items() if k in TRAINING_TYPES}
    me = replace(stored, tasks=tasks, task_type=resolver.task_type, task_index=resolver.task_id)
    return replace(me, num_replicas=replicas, num_local_replicas=replicas // me.num_workers)
