"""TensorFlow's collective operations without a strategy of tf.distribute.

Purpose: `ctl.hvd` runs TensorFlow's collectives between ranks, for which there is no public function.
Uses: `configure_collective_ops`, `enable_collective_ops`, `abort_collective_ops`, `config` and
  `_context_handle` of `tensorflow.python.eager.context.context()`. The messages of
  `tensorflow.core.protobuf` are TensorFlow's wire format and count as public.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known.
Switch: none, as these are calls.
"""

import tensorflow as tf
from ctl.tensorflow_patches.eager_context import eager_context


class ServerDefinition:
    """A `ServerDef` that TensorFlow serializes when it initializes its context.

    Args:
      task_index: Index of this task in the job "worker".
      address_by_task: Addresses ("host:port") of all tasks by their indices.
      leader: Name of the task that leads the collectives.
    """

    job_name = "worker"

    def __init__(self, task_index: int, address_by_task: dict[int, str], leader: str):
        self.task_index = task_index
        self._address_by_task = address_by_task
        self._leader = leader

    def SerializeToString(self) -> bytes:
        """Returns the definition with the configuration of the context at the time of the call."""
        from tensorflow.core.protobuf import tensorflow_server_pb2

        server = tensorflow_server_pb2.ServerDef(
            protocol="grpc",
            job_name=self.job_name,
            task_index=self.task_index,
            default_session_config=eager_context().config,
        )
        server.default_session_config.experimental.collective_group_leader = self._leader
        job = server.cluster.job.add(name=self.job_name)
        for task, address in self._address_by_task.items():
            job.tasks[task] = address
        return server.SerializeToString()


def enable_collectives(task_index: int, address_by_task: dict[int, str], leader: str) -> None:
    """Makes this process a task of a cluster for collectives. Called before the first tensor."""
    eager_context().configure_collective_ops(
        collective_leader=leader, device_filters=(f"/job:worker/task:{task_index}",)
    )
    eager_context().enable_collective_ops(ServerDefinition(task_index, address_by_task, leader))


def abort_collectives(message: str) -> None:
    """Ends all running and future collectives with UnavailableError. A no-op without a context."""
    if eager_context()._context_handle is not None:
        eager_context().abort_collective_ops(tf.errors.UNAVAILABLE, message)
