"""A word becomes a `tf.distribute` strategy.

default          no distribution: one device, the least overhead
one_device       the same through OneDeviceStrategy, on a device of choice
mirrored         all (or the given) devices of this machine, in step
multi_worker     all processes of TF_CONFIG, in step
central_storage  several devices of this machine, the variables on one of them
tpu              the cores of a TPU, in step
auto             multi_worker if TF_CONFIG names several processes, tpu if the environment names one,
                 mirrored if there are several devices, else default
"""

import contextlib
import errno
import glob
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl import cluster as cluster_lib
from ctl import communication as communication_lib
from ctl import quiet
from ctl.errors import UsageError

WORDS = ("auto", "default", "one_device", "mirrored", "multi_worker", "central_storage", "tpu")


def make(
    word: str = "auto", *, devices: Sequence[str] = (), num_virtual_devices: int = 0,
    cross_device_ops: str = "auto", communication: str = "auto", timeout_secs: float = 0.0,
    heartbeat_secs: float = 0.0, tpu: str = "",
) -> tf.distribute.Strategy:  # fmt: skip
    """The strategy for `word`; under several workers this waits for the others.

    Args:
      word: one of `WORDS`.
      devices: such as "cpu:0" or "gpu:1"; empty for the strategy's own choice.
      num_virtual_devices: splits the CPU into so many logical devices, to try several replicas
        without several GPUs; 0 leaves it whole. Must come before TensorFlow has started.
      cross_device_ops: for mirrored: auto, nccl, hierarchical_copy or reduction_to_one_device.
      communication: for multi_worker: auto, ring or nccl.
      timeout_secs: for multi_worker: of one collective; 0 waits as long as the peers live.
      heartbeat_secs: for multi_worker: a peer that is silent for so long is given up; 0 leaves it to
        TensorFlow.
      tpu: name or address of a TPU; empty for the one of this environment.

    An evaluator task trains nothing and joins nobody: whatever the word, it gets its own devices.

    Raises UsageError for an unknown word, a device that does not exist or cannot go with the
    strategy, or a bad TF_CONFIG.
    """
    if word not in WORDS:
        raise UsageError(f"strategy is {word!r}; expected one of {', '.join(WORDS)}.")
    cluster = cluster_lib.read()
    with quiet.quiet():  # the first look for GPUs is noisy without one
        tf.config.list_physical_devices()
    if cluster.task_type == "evaluator":
        return _private()
    if num_virtual_devices:
        _split_cpu(num_virtual_devices)
    if word == "auto":
        word = _suggest(cluster, devices)
    _check_cluster(word, cluster)
    _check_fitting(word, "mirrored", cross_device_ops=(cross_device_ops, "auto"))
    _check_fitting(word, "multi_worker", communication=(communication, "auto"),
                   timeout_secs=(timeout_secs, 0), heartbeat_secs=(heartbeat_secs, 0))  # fmt: skip
    _check_fitting(word, "tpu", tpu=(tpu, ""))
    if word == "tpu":
        return tpu_strategy(tpu)
    if word == "multi_worker":
        how = communication_lib.options(communication, timeout_secs)
        return _multi_worker(cluster, devices, num_virtual_devices, how, heartbeat_secs)
    names = [_device(d) for d in devices]
    if word == "mirrored":
        return _mirrored(names, num_virtual_devices, cross_device_ops)
    if word == "central_storage":
        return _central_storage(names, num_virtual_devices)
    return _single(word, names)


def word_of(strategy: tf.distribute.Strategy) -> str:
    """The word for a strategy object, e.g. "mirrored"; its class name if there is none."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return "multi_worker"
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return "mirrored"
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return "one_device"
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        return "central_storage"
    if isinstance(strategy, tf.distribute.TPUStrategy):
        return "tpu"
    return (
        "default"
        if type(strategy).__name__ == "_DefaultDistributionStrategy"
        else (type(strategy).__name__)
    )


def _suggest(cluster: cluster_lib.Cluster, devices: Sequence[str]) -> str:
    if cluster.num_workers > 1:
        return "multi_worker"
    if os.environ.get("TPU_NAME") and not devices:
        return "tpu"
    gpus = tf.config.list_logical_devices("GPU")
    count = len(devices) or len(gpus) or len(tf.config.list_logical_devices("CPU"))
    return "mirrored" if count > 1 else "default"


def _check_cluster(word: str, cluster: cluster_lib.Cluster) -> None:
    if cluster.task_type == "ps":
        raise UsageError(
            f"TF_CONFIG makes this process a {cluster.task_type!r}; expected 'chief' or 'worker'."
        )
    if word != "multi_worker" and cluster.num_workers > 1:
        raise UsageError(
            f"strategy is {word!r}, but TF_CONFIG names {cluster.num_workers} workers, and each "
            "would train on its own. Write strategy 'multi_worker' or 'auto', or unset TF_CONFIG."
        )


def _private() -> tf.distribute.Strategy:
    """For an evaluator: its own GPUs if there are several, and never the workers' cluster."""
    several = len(tf.config.list_logical_devices("GPU")) > 1
    return _mirrored([], 0, "auto") if several else tf.distribute.get_strategy()


def _check_fitting(word: str, belongs_to: str, **given: tuple) -> None:
    """Raises UsageError for arguments, name -> (value, default), of another strategy."""
    for name, (value, default) in given.items():
        if value != default and word != belongs_to:
            raise UsageError(
                f"{name}={value!r} belongs to strategy {belongs_to!r}, and the strategy is {word!r}. "
                "Leave it out."
            )


def _multi_worker(cluster, devices, num_virtual_devices: int, how, heartbeat_secs: float):
    if devices or num_virtual_devices > 1:
        came = f"devices {', '.join(devices)}" if devices else f"{num_virtual_devices} virtual CPUs"
        raise UsageError(
            f"strategy 'multi_worker' uses every GPU of a worker, or one CPU, and got {came}. Leave "
            "that out; choose GPUs with CUDA_VISIBLE_DEVICES, start more workers for more CPUs."
        )
    cluster_lib.normalise(cluster)
    _check_own_port(cluster)
    communication_lib.set_heartbeat(cluster, heartbeat_secs)
    if cluster.num_workers > 1 and tf.compat.v1.get_seed(None)[0] is None:
        tf.random.set_seed(0)  # a dataset shuffled without a seed has one order on all workers
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=how)


def tpu_strategy(name: str = "", resolver: Any = None) -> tf.distribute.Strategy:
    """Connects to a TPU, initialises it, and makes the strategy over its cores.

    Raises UsageError where none is named or none answers; asking without a name can take minutes.
    """
    here = name or os.environ.get("TPU_NAME", "")
    if resolver is None and not here and not glob.glob("/dev/accel*"):
        raise UsageError(
            "strategy 'tpu' found no TPU: none is attached to this machine, and neither tpu=... "
            "(--tpu) nor the environment variable TPU_NAME names one. Write its name, 'local', or "
            "another strategy."
        )
    try:
        resolver = resolver or tf.distribute.cluster_resolver.TPUClusterResolver(tpu=here or "local")
        if resolver.master() not in ("", "local"):
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except Exception as e:  # every layer below has errors of its own
        first = (str(e).strip().splitlines() or [""])[0]
        raise UsageError(
            f"strategy 'tpu' cannot use {here or 'the local TPU'}: {type(e).__name__}: {first[:200]}. "
            "Is the TPU running, and is this TensorFlow built for TPUs?"
        ) from e


@contextlib.contextmanager
def scope(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """`strategy.scope()`, where plain variables can be updated by a step under any strategy.

    Central storage refuses an update from replicas without an aggregation; ours are equal on all, so
    that of the first replica is as good as any.
    """
    with strategy.scope():
        if word_of(strategy) != "central_storage":
            yield
            return

        def creator(next_creator, **how):
            none = tf.VariableAggregation.NONE
            if how.get("aggregation") in (None, none):
                how["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
            return next_creator(**how)

        with tf.variable_creator_scope(creator):
            yield


def _check_own_port(cluster: cluster_lib.Cluster) -> None:
    """A port in use makes TensorFlow fail without naming it, and the peers wait for ever."""
    if cluster.num_workers < 2 or cluster.address is None:
        return
    port = int(cluster.address.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                return
            raise UsageError(
                f"Port {port} of this task's address {cluster.address} is in use. Could not start "
                "gRPC server: end the other process, or write another port into TF_CONFIG of "
                "every worker."
            ) from None


def _single(word: str, names: list[str]) -> tf.distribute.Strategy:
    if len(names) > 1:
        raise UsageError(
            f"strategy {word!r} uses one device and got {len(names)}: {', '.join(names)}. "
            "Give one, or write strategy 'mirrored'."
        )
    if word == "default" and not names:
        return tf.distribute.get_strategy()
    return tf.distribute.OneDeviceStrategy(names[0] if names else _best_device())


def _virtual(names: list[str], num_virtual_devices: int) -> list[str]:
    if not names and num_virtual_devices > 1:
        names = [f"/device:CPU:{i}" for i in range(num_virtual_devices)]
    if len(set(names)) != len(names):
        raise UsageError(f"devices names one device twice: {', '.join(names)}.")
    return names


def _mirrored(names: list[str], num_virtual_devices: int, cross_device_ops: str):
    names = _virtual(names, num_virtual_devices)
    used = names or [d.name for d in tf.config.list_logical_devices("GPU")]
    return _Mirrored(names or None, communication_lib.cross_device_ops(cross_device_ops, used))


def _central_storage(names: list[str], num_virtual_devices: int):
    names = _virtual(names, num_virtual_devices)
    if not names:
        names = [d.name for d in tf.config.list_logical_devices("GPU")] or ["/device:CPU:0"]
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=names, parameter_device="/device:CPU:0"
    )


class _Mirrored(tf.distribute.MirroredStrategy):
    """With collective keys of its own: two strategies of one process would mix up their sums."""

    def __init__(self, devices, cross_device_ops=None):
        self._collective_key_base = next(_collective_keys)
        super().__init__(devices, cross_device_ops=cross_device_ops)


_collective_keys = itertools.count(10_000_000, 10_000_000)


def _split_cpu(count: int) -> None:
    if count < 0:
        raise UsageError(f"num_virtual_devices is {count}; expected a whole number >= 0.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        )
    except RuntimeError:
        if len(tf.config.list_logical_devices("CPU")) != count:
            raise UsageError(
                f"num_virtual_devices={count} came after TensorFlow had started. Make the strategy "
                "before the first tensor; move tensors and datasets from the top of the file into "
                "build() and train_data()."
            ) from None


def _device(text: str) -> str:
    have = tf.config.list_logical_devices()
    kind, _, index = text.strip().lower().removeprefix("/").removeprefix("device:").partition(":")
    for device in have:
        if device.device_type.lower() == kind and device.name.endswith(f":{index or 0}"):
            return f"/device:{device.device_type}:{index or 0}"
    names = ", ".join(":".join(d.name.split(":")[-2:]).lower() for d in have)
    raise UsageError(
        f"device {text!r} does not exist here; this process has {names}. For several logical CPUs "
        "give num_virtual_devices."
    )


def _best_device() -> str:
    return "/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0"


@dataclass(frozen=True)
class Placement:
    """How a strategy spreads replicas over workers.

    Attributes:
      num_workers, worker_index: processes that train, and this one's rank among them.
      num_replicas, num_local_replicas: over all workers, and in this process.
      is_chief: this process writes shared files.
      evaluates: this process does not train, but evaluates what the chief has saved.
    """

    num_workers: int
    worker_index: int
    num_replicas: int
    num_local_replicas: int
    is_chief: bool
    evaluates: bool = False


def placement(strategy: tf.distribute.Strategy) -> Placement:
    """Reads the placement off a strategy object, however it was made."""
    replicas = strategy.num_replicas_in_sync
    if cluster_lib.read().task_type == "evaluator":
        return Placement(1, 0, replicas, replicas, is_chief=False, evaluates=True)
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec().as_dict() if resolver else {}
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or not spec:
        return Placement(1, 0, replicas, replicas, True)
    tasks = {k: tuple(v) for k, v in spec.items() if k in ("chief", "worker")}
    me = cluster_lib.Cluster(tasks, resolver.task_type, resolver.task_id)
    workers = me.num_workers
    return Placement(workers, me.worker_index, replicas, replicas // workers, me.is_chief)
