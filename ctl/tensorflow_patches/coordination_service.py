"""Client of TensorFlow's coordination service.

Purpose: The service of a multi-worker cluster stores values by key and detects lost tasks. TensorFlow
  exports no function for it.
Uses: `set_config_key_value`, `get_config_key_value`, `delete_config_key_value`,
  `check_collective_ops_peer_health` and `configure_coordination_service` of
  `tensorflow.python.eager.context.context()`; the protocol buffer `coordination_config_pb2`.
Versions: TensorFlow 2.16 and later; the protocol buffer has another module since 2.19.
Upstream issue: none known.
Switch: none, as these are calls.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from ctl.tensorflow_patches.eager_context import eager_context


class CoordinationClient(Protocol):
    """Methods of TensorFlow's context that use the coordination service."""

    def set_config_key_value(self, key: str, value: str) -> None:
        """Stores a value for all workers."""

    def get_config_key_value(self, key: str, timeout_in_ms: int = ...) -> str:
        """Returns a value. Blocks until it is set."""

    def delete_config_key_value(self, key: str) -> None:
        """Deletes a value."""

    def check_collective_ops_peer_health(self, task: str, timeout_in_ms: int) -> None:
        """Raises an error if a task does not answer."""


def coordination_client() -> CoordinationClient:
    """Returns the client of this process. Its methods raise `tf.errors.OpError`."""
    client: CoordinationClient = eager_context()
    return client


def configure_heartbeat(leader: str, num_tasks_by_job: Mapping[str, int], timeout_secs: float) -> None:
    """Sets the time after which a silent worker is lost. Called before the strategy is created.

    Args:
      leader: Name of the task that runs the service.
      num_tasks_by_job: Number of tasks of each job of the cluster.
      timeout_secs: Seconds without a heartbeat.
    """
    jobs = [
        _config_module().CoordinatedJob(name=name, num_tasks=count)
        for name, count in num_tasks_by_job.items()
    ]
    eager_context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        coordinated_jobs=jobs,
        heartbeat_timeout_in_ms=int(timeout_secs * 1000),
    )


def _config_module() -> Any:
    """Returns the module of the messages: that of TensorFlow 2.19 and later, or the previous one."""
    try:
        return importlib.import_module("tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2")
    except ModuleNotFoundError:
        return importlib.import_module("tensorflow.tsl.protobuf.coordination_config_pb2")
