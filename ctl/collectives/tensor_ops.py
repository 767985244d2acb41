"""A collective on tensors: at once when TensorFlow runs eagerly, as nodes in a graph otherwise.

In a graph a node asks and another one waits: asking is ordered as the program is, so all ranks ask
alike, and waits overlap. What the nodes call looks for the group when they run, so a traced function
outlives a change of ranks.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from ctl.collectives import arithmetic, tensorflow_plane
from ctl.collectives.engine import Engine
from ctl.collectives.graph_fusion import GraphFusion, TracedCollectives, can_fuse
from ctl.collectives.pending import Pending
from ctl.collectives.requests import Layout
from ctl.collectives.unclaimed import Unclaimed

_REDUCTIONS = ("allreduce", "reducescatter")
NODE_NAME = "CtlCollective"  # part of the name of a node that asks for a collective
_LARGE = 1 << 20
_SMALL = 1 << 16  # bytes of a tensor that is joined with others
_ALIGNMENT = 64
_NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(tf.__file__) + os.sep,
)


class Members(NamedTuple):
    """Who takes part: the engine of this rank, the number of the set of ranks, and the ranks."""

    engine: Engine
    number: int
    ranks: Sequence[int]


class CollectiveGroup(Protocol):
    """Ranks that do collectives together; they may change between two calls of one graph."""

    def members(self) -> Members:
        """Raises ValueError where there are none, InvalidArgumentError where this rank is not of them."""

    def check_known(self) -> None:
        """Raises ValueError for a group that can never have members."""


@dataclass(frozen=True)
class Call:
    """What all ranks do; the fields are those of `ctl.collectives.requests.Request`."""

    kind: str
    name: str
    group: CollectiveGroup
    op: int = arithmetic.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    has_splits: bool = False
    is_eager: bool = True
    line: str = ""
    ignores_scope: bool = False  # the name of a node is the same within any name scope
    joined: Layout | None = None  # where some came as one
    names: Sequence[str] = ()  # of these, where they were asked for one by one
    fuses: bool = False  # with others of one function
    is_ahead: bool = False  # small, asked for at once, and its result not taken in turn


@dataclass
class PendingCall:
    """A collective on its way, with what is needed to shape its result."""

    call: Call
    pending: Pending
    members: Members
    shapes: list[tuple[int, ...]] = field(default_factory=list)


def ask(call: Call, arrays: Sequence[Any]) -> PendingCall:
    """Returns at once. With `has_splits`, the last array holds the splits. Arrays may be eager tensors."""
    members = call.group.members()
    ranks = members.ranks
    splits: list[int] = []
    if call.has_splits:
        *arrays, given = arrays
        splits = [int(count) for count in np.asarray(given).reshape(-1)]
    elif call.kind == "alltoall" and arrays[0].ndim and len(arrays[0]) % len(ranks) == 0:
        splits = [len(arrays[0]) // len(ranks)] * len(ranks)
    shapes = [tuple(array.shape) for array in arrays]
    plane, ready, tensors, joined = members.engine.plane, [], [], call.joined
    if plane is not None and plane.carries(call.kind, arrays):
        tensors = [_shaped(_scaled(call, tensor), [-1]) for tensor in arrays]
        joined = joined or Layout(tuple(t.dtype.name for t in tensors), tuple(shapes))
    else:
        ready = [np.ascontiguousarray(_array(a)).reshape(s) for a, s in zip(arrays, shapes, strict=True)]
        ready = [_scaled(call, array) for array in ready]
    pending = members.engine.ask(
        call.kind,
        call.name,
        ready,
        joined,
        tensors,
        may_wait=not (call.is_eager or call.is_ahead),
        process_set=members.number,
        op=call.op,
        prescale=call.prescale,
        postscale=call.postscale,
        root=call.root,
        splits=splits,
        is_eager=call.is_eager,
        line=call.line,
        names=call.names,
    )
    return PendingCall(call, pending, members, shapes)


def _scaled(call: Call, array: Any) -> Any:
    if call.kind not in _REDUCTIONS or call.prescale == 1.0:
        return array
    of = tensorflow_plane.scaled_tensor if isinstance(array, tf.Tensor) else arithmetic.scaled
    return of(array, call.prescale)


def result(asked: PendingCall) -> list[np.ndarray]:
    """Waits; the results in their shapes, then the rows by rank if the kind has them."""
    pending, call = asked.pending, asked.call
    pending.wait()
    if pending.error is not None:
        raise pending.error
    more = pending.more or {}
    flat = list(pending.result)
    if call.kind in _REDUCTIONS:
        count = len(asked.members.ranks)
        of = tensorflow_plane.finished_tensor if pending.tensors else arithmetic.finished
        by_engine = call.kind == "allreduce" and not pending.tensors
        counts = [1 if by_engine and arithmetic.engine_divides(a.dtype) else count for a in flat]
        flat = [of(a, call.op, n, call.postscale) for a, n in zip(flat, counts, strict=True)]
    if call.kind in ("allreduce", "broadcast"):
        return [_shaped(a, shape) for a, shape in zip(flat, asked.shapes, strict=True)]
    ranks = asked.members.ranks
    me = ranks.index(asked.members.engine.place.rank)
    if call.kind == "reducescatter":
        rows = [arithmetic.rows_of(shape[0], len(ranks))[me] for shape in asked.shapes]
    elif call.kind == "allgather":
        by_rank = np.asarray(more["rows"], np.int64)
        rows = by_rank.sum(axis=0).tolist()
    elif call.kind == "alltoall":
        by_rank = np.asarray([counts[me] for counts in more["splits"]], np.int32)
        rows = [int(by_rank.sum())]
    else:
        return []
    found = [
        _shaped(a, (count, *shape[1:])) for a, count, shape in zip(flat, rows, asked.shapes, strict=True)
    ]
    return found if call.kind == "reducescatter" else [*found, by_rank]


def _shaped(array: Any, shape: Sequence[int]) -> Any:
    if not isinstance(array, tf.Tensor):
        return array.reshape(shape)
    with tensorflow_plane.scope_of(array):
        return tf.reshape(array, shape)


def outputs(call: Call, tensors: Sequence[tf.Tensor], name: str | None, default: str) -> list[Any]:
    """The results of a collective as tensors: eager ones, or those of a graph."""
    call.group.check_known()
    if tf.executing_eagerly():
        line = "" if name else _line()
        asked = ask(replace(call, name=name or default, line=line), tensors)
        return [_tensor(array) for array in result(asked)]
    call = replace(call, name=_unique(name or default, call.ignores_scope), is_eager=False)
    is_many = call.kind == "allreduce" and len(tensors) > 1
    if is_many and all(tensor.shape.is_fully_defined() for tensor in tensors):
        return _joined_in_graph(call, tensors)
    if call.fuses and _is_small(tensors):
        fused = _fused_in_graph(call, tensors[0])
        if fused is not None:
            return [fused]
    return _in_graph(call, tensors)


def _is_small(tensors: Sequence[tf.Tensor]) -> bool:
    """One tensor that is not worth a journey of its own."""
    first = tensors[0]
    is_one = len(tensors) == 1 and first.shape.is_fully_defined()
    return is_one and first.shape.num_elements() * first.dtype.size <= _SMALL


def _line() -> str:
    """Where this call stands in the program: the first line that is neither ours nor TensorFlow's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _array(tensor: Any) -> np.ndarray:
    """The numbers of an eager tensor, not copied where they are in the host's memory."""
    if isinstance(tensor, (np.ndarray, np.generic)):
        return np.asarray(tensor)
    numbers = tensor._numpy() if hasattr(tensor, "_numpy") else tensor.numpy()
    return np.asarray(numbers)


def _tensor(array: Any) -> tf.Tensor:
    """A large array, which nobody else has, is not copied. TensorFlow aborts on unaligned memory."""
    if isinstance(array, tf.Tensor):
        return array
    is_own = array.nbytes > _LARGE and array.flags.writeable and array.ctypes.data % _ALIGNMENT == 0
    if is_own and array.dtype.kind in "fiu":
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    if is_own and array.dtype == tf.bfloat16.as_numpy_dtype:  # of which DLPack knows nothing
        bits = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
        return tf.bitcast(bits, tf.bfloat16)
    return tf.convert_to_tensor(array)


def _unique(name: str, ignores_scope: bool = False) -> str:
    cleaned = re.sub("[^a-zA-Z0-9_./]", "_", name)
    graph = tf.compat.v1.get_default_graph()
    if not ignores_scope:
        return graph.unique_name(cleaned)
    with graph.name_scope(None):
        return graph.unique_name(cleaned)


_on_their_way: Unclaimed[PendingCall] = Unclaimed()


def _joined_in_graph(call: Call, tensors: Sequence[tf.Tensor]) -> list[Any]:
    """As `_in_graph`, with the small tensors of a type joined: a large one travels from where it lies."""
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    alone = [i for i, t in enumerate(tensors) if sizes[i] * t.dtype.size > _SMALL]
    groups = [[i] for i in alone]
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        small = [i for i, t in enumerate(tensors) if t.dtype == dtype and i not in alone]
        groups += [small] if small else []
    order = [i for group in groups for i in group]
    shapes = tuple(tuple(tensors[i].shape.as_list()) for i in order)
    said = Layout(tuple(tensors[i].dtype.name for i in order), shapes)
    sent = [
        tensors[group[0]]
        if len(group) == 1
        else tf.concat([tf.reshape(tensors[i], [-1]) for i in group], axis=0)
        for group in groups
    ]
    found: list[Any] = [None] * len(tensors)
    for group, total in zip(groups, _in_graph(replace(call, joined=said), sent), strict=True):
        parts = [total] if len(group) == 1 else tf.split(total, [sizes[i] for i in group])
        for i, part in zip(group, parts, strict=True):
            found[i] = tf.reshape(part, tensors[i].shape)
    return found


def _fused_in_graph(call: Call, tensor: tf.Tensor) -> tf.Tensor | None:
    """The result for a small tensor, which travels with others of the function; None where it cannot."""
    graph = tf.compat.v1.get_default_graph()
    most_bytes = _fusion_threshold(call)
    if not most_bytes or not can_fuse(graph):
        return None
    traced = TracedCollectives.of(graph)
    if traced.group is not call.group:
        traced.group, traced.fusions = call.group, {}
    kind = (tensor.dtype, call.op, call.prescale, call.postscale)
    fusion = traced.fusions.get(kind)
    found = fusion and fusion.extended(call.name, tensor)
    if found is None:
        after = traced.last_takes.get(call.group)

        def exchange(names: Any, shapes: Any, joined: tf.Tensor, token: tf.Tensor) -> tf.Tensor:
            said = Layout((joined.dtype.name,) * len(shapes), tuple(tuple(s.as_list()) for s in shapes))
            if len(names) == 1:
                return _nodes(replace(call, joined=said), [joined], after, token)[0]
            together = replace(call, name=_together(names), joined=said, names=tuple(names))
            return _nodes(together, [joined], after, token)[0]

        fusion = traced.fusions[kind] = GraphFusion(graph, tensor.dtype, exchange, most_bytes)
        traced.last_takes[call.group] = fusion.done
        found = fusion.extended(call.name, tensor)
    return found


def _together(names: Sequence[str]) -> str:
    return f"{names[0]}, {names[1]}" + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _plane_of(call: Call) -> Any:
    """What carries tensors themselves, if anything; None before `init`."""
    try:
        return call.group.members().engine.plane
    except (ValueError, tf.errors.InvalidArgumentError):
        return None


def _fusion_threshold(call: Call) -> int:
    """Bytes that may travel together; 0 before `init`."""
    try:
        return call.group.members().engine.settings.fusion_threshold
    except (ValueError, tf.errors.InvalidArgumentError):
        return 0


def _in_graph(call: Call, tensors: Sequence[tf.Tensor]) -> list[Any]:
    """In a function, results are taken one after the other: a thread that waits costs more than its turn.

    The nodes of a function ask in the order of the program, and none of them waits for results.
    """
    graph = tf.compat.v1.get_default_graph()
    if call.is_ahead or not isinstance(graph, tf.__internal__.FuncGraph):
        return _nodes(call, tensors)
    traced = TracedCollectives.of(graph)
    found = _nodes(call, tensors, traced.last_takes.get(call.group))
    traced.last_takes[call.group] = found[0].op
    return found


def _nodes(call: Call, tensors: Sequence[tf.Tensor], after: Any = None, token: Any = None) -> list[Any]:
    """A node that asks, and one that takes the result, after another one; with a token, both may be
    left out."""

    def ask_from_graph(*arrays: Any) -> Any:
        return np.int64(_on_their_way.put(call.name, ask(call, arrays[: len(tensors)])))

    def take_from_graph(number: Any) -> Any:
        return result(_on_their_way.take(int(number)))

    numbered = tensors[:-1] if call.has_splits else tensors
    types = [t.dtype for t in numbered]
    if call.kind == "allgather":
        types.append(tf.int64)
    elif call.kind == "alltoall":
        types.append(tf.int32)
    given = list(tensors) if token is None else [*tensors, token]
    node = tf.numpy_function if _plane_of(call) is None else tensorflow_plane.tensor_function
    number = node(ask_from_graph, given, tf.int64, stateful=token is None, name=NODE_NAME)
    number.set_shape([])
    with tf.control_dependencies([] if after is None else [after]):
        found = node(take_from_graph, [number], types, stateful=False)
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    _set_shapes(call, numbered, found)
    return found


def barrier_in_graph(call: Call, name: str) -> tf.Operation:
    """An operation that is done when all ranks have come to it."""
    call = replace(call, name=_unique(name), is_eager=False)

    def meet() -> Any:
        result(ask(call, []))
        return np.int32(0)

    return tf.numpy_function(meet, [], tf.int32).op


def _set_shapes(call: Call, tensors: Sequence[tf.Tensor], found: Sequence[tf.Tensor]) -> None:
    for tensor, output in zip(tensors, found, strict=False):
        if call.kind in ("allreduce", "broadcast"):
            output.set_shape(tensor.shape)
        elif tensor.shape.rank is not None and tensor.shape.rank > 0:
            output.set_shape([None, *tensor.shape[1:]])
    if call.kind == "allgather":
        found[-1].set_shape([None, len(tensors)])
    elif call.kind == "alltoall":
        found[-1].set_shape([None])


def differentiable(
    forward: Callable[..., list[Any]], backward: Callable[..., list[Any]], tensors: Sequence[Any]
) -> list[Any]:
    """`forward(*tensors)`; `backward(outputs, *gradients)` are the gradients of the tensors."""
    if tf.executing_eagerly() and not _is_recording():
        return forward(*tensors)

    @tf.custom_gradient
    def made(*given: Any) -> Any:
        found = forward(*given)

        def gradients(*upstream: Any) -> Any:
            return backward(found, *upstream)

        return found, gradients

    return list(made(*tensors))


def _is_recording() -> bool:
    """Whether some tape may ask for gradients; asking costs less than being prepared."""
    from tensorflow.python.eager import record

    return getattr(record, "could_possibly_record", lambda: True)()
