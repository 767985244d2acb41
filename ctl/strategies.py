"""A word becomes a `tf.distribute` strategy.

default       no distribution: one device, the least overhead
one_device    the same through OneDeviceStrategy, on a device of choice
mirrored      all (or the given) devices of this machine, in step
multi_worker  all processes of TF_CONFIG, in step
parameter_server  workers of TF_CONFIG, each at its own speed; variables live on its `ps` tasks
auto          parameter_server if TF_CONFIG lists `ps`, multi_worker if it names several processes,
              mirrored if there are several devices, else default
"""

import errno
import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf
from ctl import cluster as cluster_lib
from ctl import parameter_servers, quiet
from ctl.errors import UsageError

WORDS = ("auto", "default", "one_device", "mirrored", "multi_worker", parameter_servers.WORD)


def make(
    word: str = "auto", *, devices: Sequence[str] = (), num_virtual_devices: int = 0,
    variable_partitioner: str = "",
) -> tf.distribute.Strategy:  # fmt: skip
    """The strategy for `word`; under several workers this waits for the others.

    In a worker or `ps` of strategy "parameter_server" it serves, and then raises SystemExit(0).

    Args:
      word: one of `WORDS`.
      devices: such as "cpu:0" or "gpu:1"; empty for the strategy's own choice.
      num_virtual_devices: splits the CPU into so many logical devices, to try several replicas
        without several GPUs; 0 leaves it whole. Must come before TensorFlow has started.
      variable_partitioner: how parameter servers share large variables, e.g. "min_size:256K".

    Raises UsageError for an unknown word, a device that does not exist or cannot go with the
    strategy, or a bad TF_CONFIG.
    """
    if word not in WORDS:
        raise UsageError(f"strategy is {word!r}; expected one of {', '.join(WORDS)}.")
    cluster, whole = cluster_lib.read(), cluster_lib.read(parameter_servers=True)
    with quiet.quiet():  # the first look for GPUs is noisy without one
        tf.config.list_physical_devices()
    if num_virtual_devices:
        _split_cpu(num_virtual_devices)
    if word == "auto":
        word = parameter_servers.WORD if "ps" in whole.tasks else _suggest(cluster, devices)
    if word == parameter_servers.WORD:
        parameter_servers.check(whole, devices)
        _check_own_port(whole)
        return parameter_servers.make(whole, variable_partitioner)
    if variable_partitioner:
        raise UsageError(
            f"variable_partitioner is {variable_partitioner!r}, but strategy {word!r} has no parameter "
            "servers to share variables. Leave it out, or write strategy 'parameter_server'."
        )
    _check_cluster(word, cluster)
    if word == "multi_worker":
        return _multi_worker(cluster, devices)
    names = [_device(d) for d in devices]
    if word == "mirrored":
        return _mirrored(names, num_virtual_devices)
    if len(names) > 1:
        raise UsageError(
            f"strategy {word!r} uses one device and got {len(names)}: {', '.join(devices)}. "
            "Give one, or write strategy 'mirrored'."
        )
    if word == "default" and not names:
        return tf.distribute.get_strategy()
    return tf.distribute.OneDeviceStrategy(names[0] if names else _best_device())


def word_of(strategy: tf.distribute.Strategy) -> str:
    """The word for a strategy object, e.g. "mirrored"; its class name if there is none."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return "multi_worker"
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        return "mirrored"
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return "one_device"
    if parameter_servers.is_used(strategy):
        return parameter_servers.WORD
    return (
        "default"
        if type(strategy).__name__ == "_DefaultDistributionStrategy"
        else (type(strategy).__name__)
    )


def local(strategy: tf.distribute.Strategy) -> tf.distribute.Strategy:
    """The strategy for work within this process: parameter servers have none of their own for that."""
    return tf.distribute.get_strategy() if parameter_servers.is_used(strategy) else strategy


def place_of_counter(strategy: tf.distribute.Strategy):
    """Where the variable that counts steps is made: in host memory, or on a parameter server."""
    return strategy.scope() if parameter_servers.is_used(strategy) else tf.device("/cpu:0")


def _suggest(cluster: cluster_lib.Cluster, devices: Sequence[str]) -> str:
    if cluster.num_workers > 1:
        return "multi_worker"
    gpus = tf.config.list_logical_devices("GPU")
    count = len(devices) or len(gpus) or len(tf.config.list_logical_devices("CPU"))
    return "mirrored" if count > 1 else "default"


def _check_cluster(word: str, cluster: cluster_lib.Cluster) -> None:
    if cluster.task_type in ("ps", "evaluator"):
        raise UsageError(
            f"TF_CONFIG makes this process a {cluster.task_type!r}; expected 'chief' or 'worker'."
        )
    if word != "multi_worker" and cluster.num_workers > 1:
        raise UsageError(
            f"strategy is {word!r}, but TF_CONFIG names {cluster.num_workers} workers, and each "
            "would train on its own. Write strategy 'multi_worker' or 'auto', or unset TF_CONFIG."
        )


def _multi_worker(cluster: cluster_lib.Cluster, devices: Sequence[str]):
    if devices:
        raise UsageError(
            f"strategy 'multi_worker' uses every device of a worker and got devices "
            f"{', '.join(devices)}. Leave devices out; choose GPUs with CUDA_VISIBLE_DEVICES."
        )
    cluster_lib.normalise(cluster)
    _check_own_port(cluster)
    return tf.distribute.MultiWorkerMirroredStrategy()


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


def _mirrored(names: list[str], num_virtual_devices: int):
    if not names and num_virtual_devices > 1:
        names = [f"/device:CPU:{i}" for i in range(num_virtual_devices)]
    if len(set(names)) != len(names):
        raise UsageError(f"devices names one device twice: {', '.join(names)}.")
    return _Mirrored(names or None)


class _Mirrored(tf.distribute.MirroredStrategy):
    """With collective keys of its own: two strategies of one process would mix up their sums."""

    def __init__(self, devices):
        self._collective_key_base = next(_collective_keys)
        super().__init__(devices)


_collective_keys = itertools.count(step=10_000_000)


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
    """

    num_workers: int
    worker_index: int
    num_replicas: int
    num_local_replicas: int
    is_chief: bool


def placement(strategy: tf.distribute.Strategy) -> Placement:
    """Reads the placement off a strategy object, however it was made."""
    replicas = strategy.num_replicas_in_sync
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec().as_dict() if resolver else {}
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or not spec:
        return Placement(1, 0, replicas, replicas, True)
    tasks = {k: tuple(v) for k, v in spec.items() if k in ("chief", "worker")}
    me = cluster_lib.Cluster(tasks, resolver.task_type, resolver.task_id)
    workers = me.num_workers
    return Placement(workers, me.worker_index, replicas, replicas // workers, me.is_chief)
