"""For TF1 graphs: all variables begin with the values of one rank."""

from typing import Any

import tensorflow as tf
from ctl.hvd.variables import broadcast_variables


def broadcast_global_variables(root_rank: int) -> Any:
    """An operation that gives all ranks the variables of `root_rank`; to be run on all ranks.

    Raises RuntimeError when executing eagerly, where there is no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() is for graphs; when executing eagerly, expected "
            "hvd.broadcast_variables(model.variables, root_rank=0), and the optimizer's likewise."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts once the session is made: `MonitoredTrainingSession(hooks=[this])`.

    Args:
      root_rank: whose variables all get.
      device: accepted.
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph, before that is closed."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Collective."""
        session.run(self.bcast_op)
