"""A word becomes a `tf.distribute` strategy.

default           no distribution: one device, the least overhead
one_device        the same through OneDeviceStrategy, on a device of choice
mirrored          all (or the given) devices of this machine, in step
multi_worker      all processes of TF_CONFIG, in step
parameter_server  workers of TF_CONFIG, each at its own speed; variables live on its `ps` tasks
central_storage   several devices of this machine, the variables on one of them
tpu               the cores of a TPU, in step
auto              parameter_server if TF_CONFIG lists `ps`, multi_worker if it names several processes,
                  tpu if the environment names one, mirrored if there are several devices, else default
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from ctl.distribute import communication as communication_lib
from ctl.distribute import devices as devices_lib
from ctl.distribute import engine_all_reduce, parameter_servers, strategy_factories
from ctl.distribute.engine_all_reduce import PeerLimits
from ctl.distribute.platforms import detection
from ctl.distribute.strategy_kind import StrategyKind, has_parameter_servers, kind_of
from ctl.distribute.topology import TRAINING_TYPES, Topology
from ctl.errors import UsageError
from ctl.io import log_filter

_MADE_FROM = "_ctl_topology"  # attribute of a strategy: the topology that it was made from
WORDS = (
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
    word: str = "auto",
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
    """The strategy for `word`; under several workers this waits for the others, by name.

    Args:
      word: one of `WORDS`.
      devices: such as "cpu:0" or "gpu:1"; empty for the strategy's own choice.
      num_virtual_devices: logical CPUs to make, before TensorFlow has started; 0 leaves one.
      cross_device_ops, communication: how mirrored and multi_worker add up; see docs/flags.md.
      timeout_secs: for multi_worker, of one collective; heartbeat_secs: of silence until a peer is lost.
      tpu: its name or address; variable_partitioner: for parameter servers, e.g. "min_size:256K".
      startup_timeout_secs: for multi_worker: for the others to come; None: the launcher's, or 600.
      flags: name -> value, equal on all workers; topology: None reads the environment.

    Workers and parameter servers of "parameter_server" serve until the chief is gone, then SystemExit(0)
    is raised. An evaluator gets its own devices. Raises UsageError for an unknown word, a bad TF_CONFIG or
    workers that are not alike; PeerLostError for one that does not come.
    """
    _check_word(word)
    whole = topology or detection.read_topology()
    if whole.evaluates:
        return _made_from(whole, _private())
    if num_virtual_devices:
        devices_lib.split_cpu(num_virtual_devices)
    if word == "auto":
        word = parameter_servers.WORD if "ps" in whole.tasks else _suggest(whole, devices)
    _check_fitting(
        word,
        cross_device_ops=cross_device_ops,
        communication=communication,
        tpu=tpu,
        timeout_secs=timeout_secs,
        heartbeat_secs=heartbeat_secs,
        variable_partitioner=variable_partitioner,
    )
    if word == parameter_servers.WORD:
        return _made_from(whole, parameter_servers.connect_cluster(whole, devices, variable_partitioner))
    _check_cluster(word, whole)
    if word == "multi_worker":
        waits = heartbeat_secs, startup_timeout_secs
        how = communication_lib.options(communication, timeout_secs)
        made = strategy_factories.multi_worker(whole, devices, num_virtual_devices, how, *waits, flags)
        if communication == "tcp":
            engine_all_reduce.use_engine(made, whole, PeerLimits(heartbeat_secs, timeout_secs))
    else:
        made = _on_this_machine(word, devices, num_virtual_devices, cross_device_ops, tpu)
    return _made_from(whole, made)


def _made_from(topology: Topology, strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    if kind_of(strategy) is not StrategyKind.DEFAULT:  # that one is there without us, and once for all
        setattr(strategy, _MADE_FROM, topology)
    return strategy


def _on_this_machine(
    word: str, devices: Sequence[str], num_virtual_devices: int, cross_device_ops: str, tpu: str
) -> tf.distribute.Strategy:
    names = [devices_lib.device(d) for d in devices]
    if word == "mirrored":
        return strategy_factories.mirrored(names, num_virtual_devices, cross_device_ops)
    if word == "central_storage":
        return strategy_factories.central_storage(names, num_virtual_devices)
    return strategy_factories.tpu(tpu) if word == "tpu" else strategy_factories.single(word, names)


def local(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """The strategy for work within this process: parameter servers have none of their own for that."""
    return tf.distribute.get_strategy() if has_parameter_servers(strategy) else strategy


def place_of_counter(strategy: tf.distribute.Strategy) -> Any:
    """Where the variable that counts steps is made: in host memory, or on a parameter server."""
    return strategy.scope() if has_parameter_servers(strategy) else tf.device("/cpu:0")


def _check_word(word: str) -> None:
    """Raises UsageError for another one than those of `WORDS`; looks for devices."""
    if word not in WORDS:
        raise UsageError(f"strategy is {word!r}; expected one of {', '.join(WORDS)}.")
    with log_filter.quiet():  # the first look for GPUs is noisy without one
        tf.config.list_physical_devices()


def _suggest(cluster: Topology, devices: Sequence[str]) -> str:
    if cluster.num_workers > 1:
        return "multi_worker"
    if os.environ.get("TPU_NAME") and not devices:
        return "tpu"
    gpus = tf.config.list_logical_devices("GPU")
    count = len(devices) or len(gpus) or len(tf.config.list_logical_devices("CPU"))
    return "mirrored" if count > 1 else "default"


def _check_cluster(word: str, cluster: Topology) -> None:
    if cluster.task_type == "ps":
        raise UsageError(
            f"TF_CONFIG makes this process a {cluster.task_type!r}; expected 'chief' or 'worker'."
        )
    if word != "multi_worker" and cluster.num_workers > 1:
        better = parameter_servers.WORD if "ps" in cluster.tasks else "multi_worker"
        raise UsageError(
            f"strategy is {word!r}, but TF_CONFIG names {cluster.num_workers} workers, and each would "
            f"train on its own. Write strategy {better!r} or 'auto', or unset TF_CONFIG."
        )


def _private() -> tf.distribute.Strategy:
    """For an evaluator: its own GPUs if there are several, and never the workers' cluster."""
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


def _check_fitting(word: str, **given: Any) -> None:
    """Raises UsageError for arguments that were given and belong to another strategy."""
    for name, value in given.items():
        if value not in ("auto", "", 0) and word != _BELONGS_TO[name]:
            raise UsageError(
                f"{name}={value!r} belongs to strategy {_BELONGS_TO[name]!r}, and the strategy is "
                f"{word!r}. Leave it out."
            )


@contextlib.contextmanager
def scope(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """`strategy.scope()`, where plain variables can be updated by a step under any strategy.

    Central storage refuses an update from replicas without an aggregation; ours are equal on all, so
    that of the first replica is as good as any.
    """
    with strategy.scope():
        if kind_of(strategy) is not StrategyKind.CENTRAL_STORAGE:
            yield
            return

        def creator(next_creator: Any, **how: Any) -> Any:
            none = tf.VariableAggregation.NONE
            if how.get("aggregation") in (None, none):
                how["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
            return next_creator(**how)

        with tf.variable_creator_scope(creator):
            yield


def topology_of(strategy: tf.distribute.Strategy) -> Topology:
    """The topology with the replicas of a strategy object, however it was made.

    One that `make` made knows what it was made from; else the environment is read.
    """
    found = getattr(strategy, _MADE_FROM, None) or detection.read_topology()
    replicas = strategy.num_replicas_in_sync
    alone = replace(found, tasks={}, task_index=0, num_replicas=replicas, num_local_replicas=replicas)
    if found.evaluates:
        return alone
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec().as_dict() if resolver else {}
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or not spec:
        return replace(alone, task_type="worker")
    tasks = {k: tuple(v) for k, v in spec.items() if k in TRAINING_TYPES}
    me = replace(found, tasks=tasks, task_type=resolver.task_type, task_index=resolver.task_id)
    return replace(me, num_replicas=replicas, num_local_replicas=replicas // me.num_workers)
