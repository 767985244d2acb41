"""Factories of strategies, one for each kind. `strategies.make_strategy` selects one of them."""

import contextlib
import glob
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl.distribute import communication, devices, job_fingerprint, own_port, startup_barrier
from ctl.distribute.platforms import detection
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError
from ctl.io import exit_hook
from ctl.supervision import heartbeat, signals
from ctl.tensorflow_patches import unlocked_connection


def single(name: str, names: list[str]) -> tf.distribute.Strategy:
    """Returns the default strategy, or OneDeviceStrategy on the given device or the best one."""
    if len(names) > 1:
        raise UsageError(
            f"strategy {name!r} uses one device and got {len(names)}: {', '.join(names)}. "
            "Give one, or write strategy 'mirrored'."
        )
    if name == "default" and not names:
        return tf.distribute.get_strategy()
    return tf.distribute.OneDeviceStrategy(names[0] if names else devices.best_device())


def _virtual(names: list[str], num_virtual_devices: int) -> list[str]:
    if not names and num_virtual_devices > 1:
        names = [f"/device:CPU:{i}" for i in range(num_virtual_devices)]
    if len(set(names)) != len(names):
        raise UsageError(f"devices names one device twice: {', '.join(names)}.")
    return names


def mirrored(
    names: list[str], num_virtual_devices: int = 0, cross_device_ops: str = "auto"
) -> tf.distribute.Strategy:
    """Returns a synchronous strategy over the given devices, by default all GPUs of this machine."""
    names = _virtual(names, num_virtual_devices)
    used = names or [d.name for d in tf.config.list_logical_devices("GPU")]
    return _Mirrored(names or None, communication.cross_device_ops(cross_device_ops, used))


def central_storage(names: list[str], num_virtual_devices: int) -> tf.distribute.Strategy:
    """Returns a strategy with several compute devices and variables in host memory."""
    names = _virtual(names, num_virtual_devices)
    if not names:
        names = [d.name for d in tf.config.list_logical_devices("GPU")] or ["/device:CPU:0"]
    return tf.distribute.experimental.CentralStorageStrategy(
        compute_devices=names, parameter_device="/device:CPU:0"
    )


class _Mirrored(tf.distribute.MirroredStrategy):
    """MirroredStrategy with separate collective keys.

    Two strategies of one process with the same keys would mix up their sums.
    """

    def __init__(self, devices: Any, cross_device_ops: Any = None) -> None:
        self._collective_key_base = next(_collective_keys)
        super().__init__(devices, cross_device_ops=cross_device_ops)


_collective_keys = itertools.count(10_000_000, 10_000_000)


def multi_worker(
    cluster: Topology,
    names: Sequence[str],
    num_virtual_devices: int,
    options: Any,
    heartbeat_secs: float,
    startup_timeout_secs: float | None = None,
    flags: Mapping[str, Any] | None = None,
) -> tf.distribute.Strategy:
    """Returns a synchronous strategy over all processes of the cluster. Blocks until all have connected.

    Args:
      cluster: Topology of the job.
      names: Devices. Must be empty.
      num_virtual_devices: Must be at most 1.
      options: Communication options.
      heartbeat_secs: Silence after which a worker is lost. 0 keeps TensorFlow's default.
      startup_timeout_secs: Timeout for the other workers. None selects the default.
      flags: Flag name -> value, equal on all workers.

    Raises PeerLostError if a worker does not connect in time, UsageError if one was started with other
    code, versions, devices or `flags`.
    """
    if names or num_virtual_devices > 1:
        came = f"devices {', '.join(names)}" if names else f"{num_virtual_devices} virtual CPUs"
        raise UsageError(
            f"strategy 'multi_worker' uses every GPU of a worker, or one CPU, and got {came}. Leave "
            "that out; choose GPUs with CUDA_VISIBLE_DEVICES, start more workers for more CPUs."
        )
    exit_hook.install_exit_hook()
    heartbeat.current.start()
    cluster = cluster.without_servers()
    detection.normalise(cluster)
    own_port.check_port_is_free(cluster)
    communication.set_heartbeat(cluster, heartbeat_secs)
    if cluster.num_workers > 1 and not _is_seeded():
        tf.random.set_seed(0)  # equal order of unseeded shuffles on all workers
    gpus = len(tf.config.list_physical_devices("GPU"))
    timeout_secs = startup_barrier.timeout_of(startup_timeout_secs)
    facts = job_fingerprint.fingerprint_of_process(gpus, flags or {})
    with startup_barrier.wait_for_workers(cluster, facts, timeout_secs), _connecting():
        try:
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        except (*communication.PEER_ERRORS, tf.errors.UnknownError) as e:  # the latter: port in use
            text = (e.message or "").strip() or type(e).__name__
            raise PeerLostError(f"TensorFlow could not connect the workers: {text[:300]}") from e


@contextlib.contextmanager
def _connecting() -> Iterator[None]:
    """Keeps signals and heartbeats active while TensorFlow waits for the peers within the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.default_action())
        if not stack.enter_context(unlocked_connection.unlocked()):
            stack.enter_context(heartbeat.current.enter_phase(heartbeat.CONNECTING))
        yield


def _is_seeded() -> bool:
    try:
        return tf.compat.v1.get_seed(None)[0] is not None
    except RuntimeError:  # TF_DETERMINISTIC_OPS=1 forbids random numbers without a seed
        return False


def tpu(name: str = "", resolver: Any = None) -> tf.distribute.Strategy:
    """Connects to a TPU, initialises it and returns the strategy over its cores.

    Raises UsageError if no TPU is named or none responds. Detection without a name can take minutes.
    """
    tpu_name = name or os.environ.get("TPU_NAME", "")
    if resolver is None and not tpu_name and not glob.glob("/dev/accel*"):
        raise UsageError(
            "strategy 'tpu' found no TPU: none is attached to this machine, and neither tpu=... "
            "(--tpu) nor the environment variable TPU_NAME names one. Give its name or 'local' as tpu, or "
            "choose another strategy."
        )
    try:
        resolver = resolver or tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu_name or "local")
        if resolver.master() not in ("", "local"):
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except Exception as e:  # the layers below raise errors of many types
        first = (str(e).strip().splitlines() or [""])[0]
        raise UsageError(
            f"strategy 'tpu' cannot use {tpu_name or 'the local TPU'}: {type(e).__name__}: {first[:200]}. "
            "Is the TPU running, and is this TensorFlow built for TPUs?"
        ) from e
