"""Mutual exclusion of updates with parameter servers.

Keras 3 updates a variable by reading and assigning it, so concurrent workers lose updates (measured in
docs/decisions/0010-parameter-servers.md). The lock is a TensorFlow resource on the first parameter server.
When a worker that holds it or waits for it dies, the server cancels its call and releases the lock. All
workers compute gradients concurrently, outside the lock.
"""

import contextlib
import weakref
from typing import Any

import tensorflow as tf

_DEVICE = "/job:ps/task:0/device:CPU:0"
_RELEASES = ("ConsumeMutexLock", "If", "While")  # an update may be in a condition or a loop
_mutexes: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def held() -> Any:
    """Operations traced within the block hold the lock.

    Called under control dependencies on the gradients, so that no worker computes them while it holds the
    lock.
    """
    mutex = _mutex_of(tf.distribute.get_strategy())
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
    """Adds 1 to `counter` once `packed` and all updates traced since then are complete."""
    operations = tf.compat.v1.get_default_graph().get_operations()[operations_before:]
    with tf.control_dependencies([packed, *(op for op in operations if op.type in _RELEASES)]):
        counter.assign_add(1, read_value=False)
