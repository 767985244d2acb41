"""Graph nodes that run a collective.

One node sends the request, a second one waits for the signal of `completion.py`, and a third one takes the
results. Requests keep the order of the program. No node occupies a thread while a collective is in flight.
A node looks up the group of ranks when it runs, so a traced function remains valid after a change of ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from ctl.collectives import completion, tensorflow_plane
from ctl.collectives.calls import Call, PendingCall, submit_call, wait_for_results
from ctl.collectives.graph_fusion import FusedNodes, GraphFusion, TracedCollectives, can_fuse
from ctl.collectives.requests import Layout
from ctl.collectives.unclaimed import Unclaimed

NODE_NAME = "CtlCollective"  # part of the name of a node that sends a request
_SMALL = 1 << 16  # bytes; smaller tensors are concatenated
_function_signals = completion.FunctionSignals()


class _SignalledCall(NamedTuple):
    pending_call: PendingCall
    signal: completion.Signal


def _discard(call: _SignalledCall) -> None:
    call.signal.discard()


unclaimed: Unclaimed[_SignalledCall] = Unclaimed(_discard)


def add_collective(call: Call, tensors: Sequence[tf.Tensor]) -> list[Any]:
    """Adds the nodes of a collective to the current graph and returns its results."""
    is_group = call.kind == "allreduce" and len(tensors) > 1
    if is_group and all(tensor.shape.is_fully_defined() for tensor in tensors):
        return _add_joined(call, tensors)
    if call.fuses and _is_small(tensors):
        fused = _add_fused(call, tensors[0])
        if fused is not None:
            return [fused]
    return _add_nodes(call, tensors)


def add_barrier(call: Call) -> tf.Operation:
    """Adds the nodes of a barrier. The returned operation completes when all ranks have run it."""
    number, handle = _add_request(call, lambda: call, [], completion.add_session_queue(), stateful=True)
    signal = completion.add_wait(handle)

    def finish(number: Any) -> Any:
        _take(number)
        return np.int32(0)

    with tf.control_dependencies([signal]):
        return tf.numpy_function(finish, [number], tf.int32).op


def _is_small(tensors: Sequence[tf.Tensor]) -> bool:
    """Returns True if the call has only one tensor, of at most `_SMALL` bytes."""
    first = tensors[0]
    is_single = len(tensors) == 1 and first.shape.is_fully_defined()
    return is_single and first.shape.num_elements() * first.dtype.size <= _SMALL


def _add_nodes(call: Call, tensors: Sequence[tf.Tensor]) -> list[Any]:
    session_queue = completion.add_session_queue()
    number, handle = _add_request(call, lambda: call, tensors, session_queue, stateful=True)
    signal = completion.add_wait(handle)
    numbered = tensors[:-1] if call.has_splits else tensors
    types = [t.dtype for t in numbered]
    if call.kind == "allgather":
        types.append(tf.int64)
    elif call.kind == "alltoall":
        types.append(tf.int32)
    results = _add_take(call, number, signal, types, _take)
    _set_shapes(call, numbered, results)
    return results


def _add_request(
    call: Call,
    current_call: Callable[[], Call],
    tensors: Sequence[tf.Tensor],
    session_queue: tf.Tensor | None,
    *,
    stateful: bool,
    token: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Adds the node that sends a request.

    Args:
      call: Collective at the time of tracing.
      current_call: Returns the collective when the node runs.
      tensors: Inputs of the collective.
      session_queue: Serialized handle of the queue that signals its end. None in a function.
      stateful: If True, the node keeps the order of the program, and runs even if its results are unused.
      token: Input that prevents constant folding of a node that is not stateful.

    Returns:
      The number of the pending collective and the serialized handle of its queue.
    """
    count = len(tensors)

    def send(*inputs: Any) -> tuple[Any, Any]:
        if session_queue is None:
            signal = _function_signals.acquire()
        else:
            signal = completion.session_signal(_to_bytes(inputs[count]))
        pending_call = submit_call(current_call(), inputs[:count])
        number = unclaimed.put(call.name, _SignalledCall(pending_call, signal))
        pending_call.pending.call_when_finished(signal.send)
        return np.int64(number), np.array(signal.handle, object)

    inputs = [*tensors, *(t for t in (session_queue, token) if t is not None)]
    node = tf.numpy_function if _find_plane(call) is None else tensorflow_plane.tensor_function
    number, handle = node(send, inputs, [tf.int64, tf.string], stateful=stateful, name=NODE_NAME)
    number.set_shape([])
    handle.set_shape([])
    return number, handle


def _take(number: Any) -> list[Any]:
    pending_call, signal = unclaimed.take(int(number))
    signal.release()
    return wait_for_results(pending_call)


def _add_take(
    call: Call,
    number: tf.Tensor,
    signal: tf.Operation,
    types: Sequence[Any],
    take: Callable[[Any], list[Any]],
) -> list[Any]:
    """Adds the node that takes the results after the signal."""
    node = tf.numpy_function if _find_plane(call) is None else tensorflow_plane.tensor_function
    with tf.control_dependencies([signal]):
        results = node(take, [number], list(types), stateful=False)
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _to_bytes(text: Any) -> bytes:
    return text.numpy() if isinstance(text, tf.Tensor) else bytes(text)


def _add_joined(call: Call, tensors: Sequence[tf.Tensor]) -> list[Any]:
    """Adds a collective that concatenates small tensors of one type. Large tensors are not copied."""
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    large = [i for i, t in enumerate(tensors) if sizes[i] * t.dtype.size > _SMALL]
    groups = [[i] for i in large]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        small = [i for i, t in enumerate(tensors) if t.dtype == dtype and i not in large]
        groups += [small] if small else []
    order = [i for group in groups for i in group]
    shapes = tuple(tuple(tensors[i].shape.as_list()) for i in order)
    layout = Layout(tuple(tensors[i].dtype.name for i in order), shapes)
    inputs = [
        tensors[group[0]]
        if len(group) == 1
        else tf.concat([tf.reshape(tensors[i], [-1]) for i in group], axis=0)
        for group in groups
    ]
    results: list[Any] = [None] * len(tensors)
    for group, total in zip(groups, _add_nodes(replace(call, joined=layout), inputs), strict=True):
        parts = [total] if len(group) == 1 else tf.split(total, [sizes[i] for i in group])
        for i, part in zip(group, parts, strict=True):
            results[i] = tf.reshape(part, tensors[i].shape)
    return results


def _add_fused(call: Call, tensor: tf.Tensor) -> tf.Tensor | None:
    """Fuses a small tensor with the tensors of other calls. Returns its result, or None if impossible."""
    graph = tf.compat.v1.get_default_graph()
    max_bytes = _fusion_threshold(call)
    if not max_bytes or not can_fuse(graph):
        return None
    traced = TracedCollectives.get_or_create(graph)
    if traced.group is not call.group:
        traced.group, traced.fusions = call.group, {}
    key = (tensor.dtype, call.op, call.prescale, call.postscale)
    fusion = traced.fusions.get(key)
    result = fusion and fusion.extend(call.name, tensor)
    if result is None:
        fusion = traced.fusions[key] = GraphFusion(graph, _FusedCall(call, tensor.dtype), max_bytes)
        result = fusion.extend(call.name, tensor)
    return result


class _FusedCall(FusedNodes):
    """Nodes of fused all-reduces. The number of tensors is final at the end of the trace."""

    def __init__(self, call: Call, dtype: tf.DType):
        super().__init__(dtype)
        self._call = call
        self._cached: Call | None = None
        self._session_queue = completion.add_session_queue()

    def add_request(self, joined: tf.Tensor, token: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _add_request(
            self._call, self._current_call, [joined], self._session_queue, stateful=False, token=token
        )

    def add_wait(self, handle: tf.Tensor) -> tf.Operation:
        return completion.add_wait(handle)

    def add_take(
        self, number: tf.Tensor, signal: tf.Operation, capacity: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        def take(number: Any) -> list[Any]:
            return [*_take(number), self._sizes(capacity)]

        total, sizes = _add_take(self._call, number, signal, [self.dtype, tf.int64], take)
        return total, sizes

    def _sizes(self, capacity: int) -> np.ndarray:
        sizes = np.zeros(capacity, np.int64)
        sizes[: len(self.shapes)] = [math.prod(shape) for shape in self.shapes]
        return sizes

    def _current_call(self) -> Call:
        if self._cached is None or len(self._cached.joined.shapes) != len(self.names):  # type: ignore[union-attr]
            layout = Layout((self.dtype.name,) * len(self.names), tuple(self.shapes))
            is_single = len(self.names) == 1
            name = self.names[0] if is_single else _build_joined_name(self.names)
            names = () if is_single else tuple(self.names)
            self._cached = replace(self._call, name=name, joined=layout, names=names)
        return self._cached


def _build_joined_name(names: Sequence[str]) -> str:
    return f"{names[0]}, {names[1]}" + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _find_plane(call: Call) -> Any:
    """Returns the additional data plane, or None if there is none or before `init`."""
    try:
        return call.group.members().engine.plane
    except (ValueError, tf.errors.InvalidArgumentError):
        return None


def _fusion_threshold(call: Call) -> int:
    """Returns the maximum size of a fused message (bytes), or 0 before `init`."""
    try:
        return call.group.members().engine.settings.fusion_threshold
    except (ValueError, tf.errors.InvalidArgumentError):
        return 0


def _set_shapes(call: Call, tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> None:
    for tensor, result in zip(tensors, results, strict=False):
        if call.kind in ("allreduce", "broadcast"):
            result.set_shape(tensor.shape)
        elif tensor.shape.rank is not None and tensor.shape.rank > 0:
            result.set_shape([None, *tensor.shape[1:]])
    if call.kind == "allgather":
        results[-1].set_shape([None, len(tensors)])
    elif call.kind == "alltoall":
        results[-1].set_shape([None])
