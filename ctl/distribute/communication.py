"""Communication options: collective implementation, timeouts and failure detection."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf
from ctl.collectives.failures import LostRankError
from ctl.errors import UsageError
from ctl.tensorflow_patches import coordination_service

if TYPE_CHECKING:
    from ctl.distribute.topology import Topology

CROSS_DEVICE_OPS = ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device")
COMMUNICATIONS = ("auto", "ring", "nccl", "tcp", "mpi")
PEER_ERRORS = (  # raised if another task has ended or cannot be reached
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
    tf.errors.CancelledError,
    LostRankError,
)


def cross_device_ops(name: str, devices: Sequence[str]) -> tf.distribute.CrossDeviceOps | None:
    """Returns the all-reduce of a MirroredStrategy over `devices`. None selects the strategy's default."""
    if name not in CROSS_DEVICE_OPS:
        raise UsageError(f"cross_device_ops is {name!r}; expected one of {', '.join(CROSS_DEVICE_OPS)}.")
    if name == "nccl":
        _check_nccl("cross_device_ops", devices)
    factory_by_name = {
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
    }
    return factory_by_name[name]() if name in factory_by_name else None


def options(name: str, timeout_secs: float) -> tf.distribute.experimental.CommunicationOptions:
    """Returns the options of a MultiWorkerMirroredStrategy. A `timeout_secs` of 0 disables the timeout."""
    if name not in COMMUNICATIONS:
        raise UsageError(f"communication is {name!r}; expected one of {', '.join(COMMUNICATIONS)}.")
    if not 0 <= timeout_secs < math.inf:
        raise UsageError(f"timeout_secs is {timeout_secs}; expected seconds > 0, or 0 for no limit.")
    if name == "nccl":
        _check_nccl("communication", [d.name for d in tf.config.list_logical_devices("GPU")])
    choices = tf.distribute.experimental.CommunicationImplementation
    return tf.distribute.experimental.CommunicationOptions(
        implementation={"ring": choices.RING, "nccl": choices.NCCL}.get(name, choices.AUTO),
        timeout_seconds=timeout_secs or None,
    )


def set_heartbeat(cluster: "Topology", secs: float) -> None:
    """Sets the silence after which a worker is lost (seconds). 0 keeps TensorFlow's default.

    Must be called before the strategy is created, which keeps an existing configuration of the service.
    """
    if not 0 <= secs < math.inf:
        raise UsageError(f"heartbeat_secs is {secs}; expected seconds > 0, or 0.")
    if not secs or cluster.num_workers < 2:
        return
    leader = "chief" if "chief" in cluster.tasks else "worker"
    num_tasks_by_job = {name: len(addresses) for name, addresses in cluster.tasks.items()}
    coordination_service.configure_heartbeat(f"/job:{leader}/replica:0/task:0", num_tasks_by_job, secs)


def _check_nccl(name: str, devices: Sequence[str]) -> None:
    if not devices or any("GPU" not in d.upper() for d in devices):
        raise UsageError(
            f"{name}='nccl' sums on GPUs, but this process has {', '.join(devices) or 'none'}. "
            "Leave it out, or write 'auto'."
        )
