"""Broadcast of the initial variables in TF1 graphs."""

from typing import Any

import tensorflow as tf
from ctl.hvd.variables import broadcast_variables


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns an operation that broadcasts all variables of `root_rank`. Collective when it runs.

    Raises RuntimeError when executing eagerly, because TensorFlow then has no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() was called in eager mode; expected a graph. In eager mode call "
            "hvd.broadcast_variables(model.variables, root_rank=0), also for the optimizer's variables."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook that broadcasts the variables of one rank after the creation of the session.

    Args:
      root_rank: Rank with the variables to broadcast.
      device: Device of the operation.
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph before the graph is finalized."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcasts the variables. Collective."""
        session.run(self.bcast_op)
