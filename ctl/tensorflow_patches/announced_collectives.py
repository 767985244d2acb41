"""Calls of a function before each collective of a tf.distribute strategy.

Purpose: `--check_collectives` compares the next collective of all workers before any data is exchanged.
Replaces: `_all_reduce_per_replica_values` of
  `tensorflow.python.distribute.cross_device_ops.CollectiveAllReduce`; `all_reduce` and `_all_gather` of
  `tensorflow.python.distribute.cross_device_utils.CollectiveReplicaLauncher`; `broadcast_send`,
  `broadcast_recv` and their versions 2 in `tensorflow.python.ops.collective_ops`.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known. TensorFlow pairs collectives of workers by their order alone.
Switch: `announced_collectives`. Without the patch `--check_collectives` has no effect.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ctl.tensorflow_patches import switches

LAUNCHER_METHODS = ("all_reduce", "_all_gather")
BROADCASTS = ("broadcast_send", "broadcast_recv", "broadcast_send_v2", "broadcast_recv_v2")

Announce = Callable[..., None]


def announce_collectives(
    announce: Announce, around_reduction: Callable[[], AbstractContextManager[None]]
) -> None:
    """Installs the wrappers. Every collective passes them when it is traced or run eagerly.

    Args:
      announce: Called as `announce(name, shape, dtype)`, or `announce(name)`, before a collective.
      around_reduction: Returns a context manager for a reduction. TensorFlow launches the collectives of a
        reduction in further threads, and their stacks do not contain the code of the user.
    """
    from tensorflow.python.distribute import cross_device_ops, cross_device_utils
    from tensorflow.python.ops import collective_ops

    if not switches.is_enabled("announced_collectives"):
        return
    reduction_class: Any = cross_device_ops.CollectiveAllReduce
    all_reduce = reduction_class._all_reduce_per_replica_values

    @functools.wraps(all_reduce)
    def all_reduce_within_context(*args: Any, **kwargs: Any) -> Any:
        with around_reduction():
            return all_reduce(*args, **kwargs)

    reduction_class._all_reduce_per_replica_values = all_reduce_within_context

    launcher_class: Any = cross_device_utils.CollectiveReplicaLauncher
    for method in LAUNCHER_METHODS:
        original = getattr(launcher_class, method)
        setattr(launcher_class, method, _announced_method(method, original, announce))
    for function in BROADCASTS:
        if hasattr(collective_ops, function):
            original = getattr(collective_ops, function)
            setattr(collective_ops, function, _announced_broadcast(original, announce))


def _announced_method(name: str, method: Callable, announce: Announce) -> Callable:
    @functools.wraps(method)
    def announced(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if str(self._device).endswith(":0"):  # further devices of a worker run the same collective
            announce(name.strip("_"), tensor.shape, tensor.dtype.name)
        return method(self, tensor, *args, **kwargs)

    return announced


def _announced_broadcast(function: Callable, announce: Announce) -> Callable:
    @functools.wraps(function)
    def announced(*args: Any, **kwargs: Any) -> Any:
        announce("broadcast of a new variable")
        return function(*args, **kwargs)

    return announced
