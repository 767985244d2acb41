"""Signals that resume a graph when a collective completes, without a waiting thread.

A node that waits in Python occupies a thread of TensorFlow. `QueueDequeueV2` does not, so the graph waits
in this operation until the thread that completes the request adds an element to the queue. In functions
each request has a separate queue, because a failed call may leave a signal in its queue. A graph of
TensorFlow 1 can only use queues of its session. There each collective has one queue, and another run of
the session adds the element.
"""

import contextlib
import functools
import itertools
import threading
import weakref
from collections import deque
from typing import Any, Protocol

import tensorflow as tf
from ctl.tensorflow_patches import session_registry

_MAX_ROUTES = 1 << 16
_CPU = "/device:CPU:0"  # has the kernels of queues
_sessions: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Signal(Protocol):
    """Signal of one request.

    Attributes:
      handle: Serialized handle of the queue.
    """

    handle: bytes

    def send(self) -> None:
        """Resumes the graph."""

    def release(self) -> None:
        """Allows another request to use the queue, after the graph has resumed."""

    def discard(self) -> None:
        """Frees the queue of a request with unused results."""


def add_session_queue() -> tf.Tensor | None:
    """Adds a queue to a graph of TensorFlow 1.

    Each kernel has a queue with a name that is unique in the process.

    Returns:
      The serialized handle of the queue, `[]` string, or None in a function.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        return None
    session_registry.record_sessions(_sessions.add)
    _signal_nodes(_outermost_graph())  # now, because a graph may be finalized later
    with tf.device(_CPU):
        queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.bool], shapes=[[]], capacity=-1)
        return tf.raw_ops.SerializeTensor(tensor=queue)


def add_wait(handle: tf.Tensor) -> tf.Operation:
    """Adds an operation that completes when an element is added to the queue of a serialized handle."""
    with tf.device(_CPU):
        queue = tf.raw_ops.ParseTensor(serialized=handle, out_type=tf.resource)
        (element,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.bool])
    return element.op


class FunctionSignals:
    """Pool of signals for functions."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._free: deque[_FunctionSignal] = deque()
        self._lock = threading.Lock()

    def acquire(self) -> Signal:
        """Returns an unused signal, a new one if necessary."""
        with self._lock:
            if self._free:
                return self._free.pop()
            name = f"ctl_signal_{next(self._numbers)}"
        with tf.device(_CPU):
            queue = tf.raw_ops.FIFOQueueV2(
                component_types=[tf.bool], shapes=[[]], capacity=-1, shared_name=name
            )
            return _FunctionSignal(queue, tf.raw_ops.SerializeTensor(tensor=queue).numpy(), self)

    def release(self, signal: "_FunctionSignal") -> None:
        """Returns a signal to the pool."""
        with self._lock:
            self._free.append(signal)


class _FunctionSignal:
    def __init__(self, queue: Any, handle: bytes, pool: FunctionSignals):
        self.handle = handle
        self._queue = queue
        self._pool = pool

    def send(self) -> None:
        with tf.device(_CPU), contextlib.suppress(tf.errors.OpError):  # the queue was discarded
            tf.raw_ops.QueueEnqueueV2(handle=self._queue, components=[True])

    def release(self) -> None:
        self._pool.release(self)

    def discard(self) -> None:
        with tf.device(_CPU), contextlib.suppress(tf.errors.OpError):
            tf.raw_ops.DestroyResourceOp(resource=self._queue)


class _SessionSignal:
    def __init__(self, session: Any, nodes: "_SignalNodes", handle: bytes):
        self.handle = handle
        self._session = weakref.ref(session)
        self._nodes = nodes

    def send(self) -> None:
        session = self._session()
        if session is not None:
            with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session was closed
                _run(session, self._nodes.enqueue, self._nodes, self.handle)

    def release(self) -> None: ...

    def discard(self) -> None: ...


@functools.lru_cache(_MAX_ROUTES)
def session_signal(handle: bytes) -> Signal:
    """Returns the signal of a queue of a session.

    Raises RuntimeError if no recorded session has the queue.
    """
    for session in list(_sessions):
        nodes = _signal_nodes(session.graph)
        if nodes is not None and _owns_queue(session, nodes, handle):
            return _SessionSignal(session, nodes, handle)
    raise RuntimeError(
        "the session of a graph with a collective of ctl.hvd was not found. Run the graph with "
        "tf.compat.v1.Session."
    )


class _SignalNodes:
    """Operations of a session's graph on a queue. The handle of the queue is fed."""

    def __init__(self) -> None:
        with tf.name_scope("ctl_signal"), tf.device(_CPU):
            self.handle = tf.compat.v1.placeholder(tf.string, [])
            queue = tf.raw_ops.ParseTensor(serialized=self.handle, out_type=tf.resource)
            self.size = tf.raw_ops.QueueSizeV2(handle=queue)
            self.enqueue = tf.raw_ops.QueueEnqueueV2(handle=queue, components=[True])


def _outermost_graph() -> Any:
    graph: Any = tf.compat.v1.get_default_graph()
    while isinstance(graph, tf.__internal__.FuncGraph):
        graph = graph.outer_graph
    return graph


def _signal_nodes(graph: Any) -> _SignalNodes | None:
    """Returns the nodes of a session's graph, or None if the graph is finalized and has none."""
    if not hasattr(graph, "_ctl_signal_nodes"):
        if graph.finalized:
            return None
        with graph.as_default(), tf.control_dependencies(None):
            graph._ctl_signal_nodes = _SignalNodes()
    return graph._ctl_signal_nodes


def _owns_queue(session: Any, nodes: _SignalNodes, handle: bytes) -> bool:
    with contextlib.suppress(tf.errors.OpError, RuntimeError):  # another session's queue, closed session
        _run(session, nodes.size, nodes, handle)
        return True
    return False


def _run(session: Any, fetch: Any, nodes: _SignalNodes, handle: bytes) -> None:
    options = None
    if not session.sess_str:  # runs in this thread, so that it needs no thread of the pool
        options = tf.compat.v1.RunOptions(inter_op_thread_pool=-1)
    session.run(fetch, {nodes.handle: handle}, options=options)
