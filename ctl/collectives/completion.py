"""Queues that resume a graph when a collective completes, without a thread that waits.

A node that waits in Python occupies a thread of TensorFlow. TensorFlow runs `QueueDequeueV2` without a
thread, so a graph waits there. The queue belongs to a node of the graph. Its serialized handle reaches
Python with the request, and the thread that completes the request adds one element. For functions it
runs an eager operation; for graphs of TensorFlow 1 it runs an operation of their session.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_MAX_ROUTES = 1 << 16
_CPU = "/device:CPU:0"  # has the kernels of queues
_sessions: "weakref.WeakSet[Any]" = weakref.WeakSet()


def add_queue() -> tuple[tf.Tensor, tf.Tensor]:
    """Adds a queue to the current graph; returns its handle and the serialized handle `[]` string.

    Each kernel has a queue with a name that is unique in the process.
    """
    _install_session_registry()
    with tf.device(_CPU):
        queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.bool], shapes=[[]], capacity=-1)
        handle = tf.raw_ops.SerializeTensor(tensor=queue)
    if not tf.compat.v1.executing_eagerly_outside_functions():
        _signal_nodes(_outermost_graph())  # now, because a graph may be finalized later
    return queue, handle


def add_wait(queue: tf.Tensor, request: tf.Operation) -> tf.Operation:
    """Adds the operation that ends when the queue gets an element; it starts after `request`."""
    with tf.device(_CPU), tf.control_dependencies([request]):
        (element,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.bool])
    return element.op


@functools.lru_cache(_MAX_ROUTES)
def signal_of(handle: bytes) -> Callable[[], None]:
    """Returns the function that adds an element to a queue.

    Raises RuntimeError if the queue belongs neither to a function nor to a known session.
    """
    if tf.executing_eagerly():
        with tf.device(_CPU):
            queue = tf.raw_ops.ParseTensor(serialized=handle, out_type=tf.resource)
            with contextlib.suppress(tf.errors.NotFoundError):
                tf.raw_ops.QueueSizeV2(handle=queue)
                return functools.partial(_signal_function, queue)
    for session in list(_sessions):
        nodes = _signal_nodes(session.graph)
        if nodes is not None and _owns_queue(session, nodes, handle):
            return functools.partial(_signal_session, weakref.ref(session), nodes, handle)
    raise RuntimeError(
        "a collective of ctl.hvd runs in a graph that has no known session. Run it with "
        "tf.compat.v1.Session, in a graph that was not finalized before the function was traced."
    )


def _signal_function(queue: Any) -> None:
    with contextlib.suppress(tf.errors.OpError), tf.device(_CPU):  # the function has ended
        tf.raw_ops.QueueEnqueueV2(handle=queue, components=[True])


class _SignalNodes:
    """Operations of a session's graph that use the queue of a fed handle."""

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
    """Returns the nodes of a session's graph; None if it is finalized and has none."""
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


def _signal_session(session: Any, nodes: _SignalNodes, handle: bytes) -> None:
    with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session was closed
        if session() is not None:
            _run(session(), nodes.enqueue, nodes, handle)


def _run(session: Any, fetch: Any, nodes: _SignalNodes, handle: bytes) -> None:
    options = None
    if not session.sess_str:  # runs in this thread, so that it needs no thread of the pool
        options = tf.compat.v1.RunOptions(inter_op_thread_pool=-1)
    session.run(fetch, {nodes.handle: handle}, options=options)


def _install_session_registry() -> None:
    """Records each session from its next run on; TensorFlow has no list of sessions."""
    from tensorflow.python.client import session

    extend = session.BaseSession._extend_graph
    if hasattr(extend, "_of_hvd"):
        return

    @functools.wraps(extend)
    def extend_and_record(self: Any) -> None:
        _sessions.add(self)
        extend(self)

    extend_and_record.__dict__["_of_hvd"] = True
    session.BaseSession._extend_graph = extend_and_record
