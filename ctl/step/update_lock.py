"""One worker at a time applies an update, where the variables live on parameter servers.

Keras 3 updates a variable by reading and assigning it, so two workers at once lose updates (measured
in docs/decisions/0010-parameter-servers.md). The lock is a resource of TensorFlow on the first
parameter server; when a worker that holds it or waits for it dies, its call is cancelled there and
the lock is free again. Gradients are computed outside it, by all workers at once.
"""

import contextlib
import weakref
from typing import Any

import tensorflow as tf

_DEVICE = "/job:ps/task:0/device:CPU:0"
_RELEASES = ("ConsumeMutexLock", "If", "While")  # an update may stand in a condition or a loop
_mutexes: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def held() -> Any:
    """What is traced inside runs while no other worker is in here; does nothing elsewhere.

    Call it under control dependencies on the gradients, so that nobody holds the lock and computes.
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.ParameterServerStrategy):
        yield
        return
    mutex = _mutex_of(strategy)
    graph = tf.compat.v1.get_default_graph()
    lock = tf.raw_ops.MutexLock(mutex=mutex)
    before = len(graph.get_operations())
    with tf.control_dependencies([lock]):
        yield
    with tf.control_dependencies(graph.get_operations()[before:]), tf.device(mutex.device):
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def _mutex_of(strategy: Any) -> Any:
    if strategy not in _mutexes:
        with tf.init_scope(), tf.device(_DEVICE):
            _mutexes[strategy] = tf.raw_ops.MutexV2(shared_name="", container="")
    return _mutexes[strategy]


@tf.autograph.experimental.do_not_convert
def count_after(counter: tf.Variable, packed: Any, operations_before: int) -> None:
    """Traced: adds 1 to `counter` when `packed` and all updates traced since then are complete."""
    made = tf.compat.v1.get_default_graph().get_operations()[operations_before:]
    with tf.control_dependencies([packed, *(op for op in made if op.type in _RELEASES)]):
        counter.assign_add(1, read_value=False)
