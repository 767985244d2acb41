"""Collectives on tensors with Horovod's API.

All run eagerly, or as nodes of a `tf.function` or a graph; all have gradients. `name` matches the calls of
different ranks (default: type and order). `process_set` are the participating ranks. `device_dense` and
`device_sparse` are ignored. Errors on every rank: tf.errors.FailedPreconditionError for different calls,
InvalidArgumentError for splits, HorovodInternalError for a lost rank, or ValueError.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from ctl.collectives import arithmetic, tensor_ops
from ctl.collectives.calls import Call
from ctl.collectives.gradients import run_with_gradient
from ctl.hvd.compression import Compression, effective_compression
from ctl.hvd.errors import RefusedError
from ctl.hvd.process_sets import ProcessSet, global_process_set, ranks_of
from ctl.hvd.run_time import index_op, rank_op, size_op

Average, Sum, Adasum = arithmetic.AVERAGE, arithmetic.SUM, arithmetic.ADASUM
Min, Max, Product = arithmetic.MIN, arithmetic.MAX, arithmetic.PRODUCT

_plain = tf.autograph.experimental.do_not_convert
_NO_NUMBERS = {dtype.as_datatype_enum for dtype in (tf.string, tf.resource, tf.variant)}


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Returns the reduction of `op` and the deprecated `average`. Raises ValueError if both are given."""
    if op is not None and average is not None:
        raise ValueError("both op and average were given; leave average out, it is the old form.")
    if op is None:
        return Sum if average is False else Average
    return checked_reduction(op)


def checked_reduction(op: int) -> int:
    """Returns a valid reduction. Raises RefusedError for Adasum, or ValueError for other numbers."""
    if op == Adasum:
        raise RefusedError(
            "Adasum is not there. Average gradients (op=hvd.Average) and raise the learning rate "
            "slowly with hvd.callbacks.LearningRateWarmupCallback."
        )
    if op not in arithmetic.OPS:
        raise ValueError(f"op is {op!r}; expected hvd.Average, Sum, Min, Max or Product.")
    return op


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Returns True for 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


@_plain
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Returns a tensor of the same shape, reduced elementwise over ranks with `op`, by default Average.

    `prescale_factor` multiplies before, `postscale_factor` after; integers are averaged and scaled
    towards zero. `tf.IndexedSlices` are gathered instead: Sum and Average only, without scales.
    """
    found = grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
        _what="HorovodAllreduce",
    )
    return found[0]


@_plain
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    _what: str = "HorovodGroupedAllreduce",
) -> list[Any]:
    """Returns the `allreduce` of several tensors of any types and shapes, in one exchange."""
    op = handle_average_backwards_compatibility(op, average)
    if not len(tensors):
        return list(tensors)
    found: list[Any] = list(tensors)
    sparse = [i for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    if sparse:
        _check_sparse(op, prescale_factor, postscale_factor)
        slices, own = [tensors[i] for i in sparse], name and f"{name}.sparse"
        for i, one in zip(sparse, _allreduce_slices(slices, op, process_set, own), strict=True):
            found[i] = one
    if dense:
        given = [_tensor(tensors[i]) for i in dense]
        default = _named(_what, given)
        compression = effective_compression(compression)
        packed, contexts = zip(*[compression.compress(t) for t in given], strict=True)
        call = Call("allreduce", "", process_set, op, prescale_factor, postscale_factor)
        is_single = _what == "HorovodAllreduce"
        call = replace(call, ignores_scope=ignore_name_scope, fuses=is_single)
        reduced = _allreduced(call, packed, name, default)
        for i, tensor, context in zip(dense, reduced, contexts, strict=True):
            found[i] = compression.decompress(tensor, context)
    return found


def _check_sparse(op: int, prescale: float, postscale: float) -> None:
    if op not in (Sum, Average):
        raise NotImplementedError(
            f"allreduce of tf.IndexedSlices with op={arithmetic.OPS[op]}; expected Sum or Average. "
            "tf.convert_to_tensor() makes it dense."
        )
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError(
            "prescale_factor and postscale_factor are not for tf.IndexedSlices; scale its values."
        )


def _allreduce_slices(several: Any, op: int, process_set: Any, name: str | None) -> list[tf.IndexedSlices]:
    """Gathers all values and indices in one exchange."""
    parts = [part for one in several for part in (one.values, one.indices)]
    gathered = iter(grouped_allgather(parts, process_set=process_set, name=name))
    found = []
    for one in several:
        values, indices = next(gathered), next(gathered)
        if op == Average:
            values = values / tf.cast(size_op(process_set.process_set_id or 0), values.dtype)
        found.append(tf.IndexedSlices(values, indices, dense_shape=one.dense_shape))
    return found


def _allreduced(call: Call, tensors: Any, name: Any, default: Any) -> list[Any]:
    def backward(_: Any, *gradients: Any) -> Any:
        if call.op not in (Sum, Average):
            raise RefusedError(
                f"the gradient of allreduce with op={arithmetic.OPS[call.op]} was asked for; it is "
                "defined for Sum and Average only. Wrap the tensor in tf.stop_gradient()."
            )
        dense = [tf.convert_to_tensor(g) for g in gradients]
        return _allreduced(call, dense, None, f"{default}_grad")

    def forward(*given: Any) -> Any:
        return tensor_ops.run_collective(call, given, name, default)

    return run_with_gradient(forward, backward, tensors)


@_plain
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns `[sum of n, ...]` from `[n, ...]` of each rank, in order of rank; n may differ, and be 0."""
    return _allgathered([tensor], "HorovodAllgather", name, ignore_name_scope, process_set)[0]


@_plain
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Returns the `allgather` of several tensors in one exchange."""
    if not len(tensors):
        return list(tensors)
    return _allgathered(tensors, "HorovodGroupedAllgather", name, ignore_name_scope, process_set)


def _allgathered(
    tensors: Any, what: Any, name: Any, ignore_name_scope: Any, process_set: Any
) -> list[tf.Tensor]:
    given = [_tensor(t) for t in tensors]
    default = _named(what, given)
    call = Call("allgather", "", process_set, ignores_scope=ignore_name_scope)

    def forward(*inner: Any) -> Any:
        return tensor_ops.run_collective(call, inner, name, default)

    def backward(found: Any, *gradients: Any) -> Any:
        *_, rows = found
        means = [
            allreduce(g, op=Average, process_set=process_set, name=_graph_name(f"{default}_grad{i}"))
            for i, g in enumerate(gradients[:-1])
        ]
        return [_own_rows(mean, rows[:, i], process_set) for i, mean in enumerate(means)]

    return run_with_gradient(forward, backward, given)[:-1]


def _own_rows(tensor: Any, rows: Any, process_set: Any) -> Any:
    me = index_op(process_set)
    start = tf.reduce_sum(rows[:me])
    return tensor[start : start + rows[me]]


@_plain
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the tensor of `root_rank`, a rank among all, on every rank."""
    given = _tensor(tensor)
    default = _named("HorovodBroadcast", [given])
    call = Call("broadcast", "", process_set, root=root_rank, ignores_scope=ignore_name_scope)

    def forward(inner: Any) -> Any:
        return tensor_ops.run_collective(call, [inner], name, default)

    def backward(_: Any, gradient: Any) -> Any:
        mean = allreduce(gradient, op=Average, process_set=process_set, name=_graph_name(f"{default}_grad"))
        return [mean * tf.cast(tf.equal(rank_op(), root_rank), mean.dtype)]

    return run_with_gradient(forward, backward, [given])[0]


@_plain
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of `tensor` to the ranks in order. Returns the rows received from them, in order of rank.

    Args:
      tensor: `[n, ...]`.
      splits: `[ranks]` integers, rows for each rank. Default: equal numbers.

    Returns the tensor; with `splits`, also the number of rows from each rank, `[ranks]` int32.
    """
    given = [_tensor(tensor)]
    default = _named("HorovodAlltoall", given)
    if splits is not None:
        counts = tf.convert_to_tensor(splits)
        if not counts.dtype.is_integer:
            raise ValueError(f"splits has the type {counts.dtype.name}; expected integers.")
        given.append(tf.cast(counts, tf.int32))
    call = Call("alltoall", "", process_set, has_splits=splits is not None, ignores_scope=ignore_name_scope)

    def forward(*inner: Any) -> Any:
        return tensor_ops.run_collective(call, inner, name, default)

    def backward(found: Any, gradient: Any, _: Any) -> Any:
        back, _ = alltoall(gradient, found[1], process_set=process_set, name=_graph_name(f"{default}_grad"))
        return [back] if splits is None else [back, None]

    received, rows = run_with_gradient(forward, backward, given)
    return received if splits is None else (received, rows)


@_plain
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Returns this rank's part of the rows of `[n, ...]`, reduced over ranks. The first ranks get more."""
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name,
        ignore_name_scope,
        _what="HorovodReducescatter",
    )[0]


@_plain
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
    _what: str = "HorovodGroupedReducescatter",
) -> list[tf.Tensor]:
    """Returns the `reducescatter` of several tensors in one exchange."""
    op = checked_reduction(op)
    if not len(tensors):
        return list(tensors)
    given = [_tensor(t) for t in tensors]
    default = _named(_what, given)
    call = Call(
        "reducescatter",
        "",
        process_set,
        op,
        prescale_factor,
        postscale_factor,
        ignores_scope=ignore_name_scope,
    )
    compression = effective_compression(compression)
    packed, contexts = zip(*[compression.compress(t) for t in given], strict=True)

    def forward(*inner: Any) -> Any:
        return tensor_ops.run_collective(call, inner, name, default)

    def backward(_: Any, *gradients: Any) -> Any:
        factor = prescale_factor * postscale_factor
        if op == Sum:
            factor = factor * len(ranks_of(process_set)[1])
        names = [_graph_name(f"{default}_grad{i}") for i in range(len(gradients))]
        scaled = [g * tf.cast(factor, g.dtype) for g in gradients]
        return [allgather(g, process_set=process_set, name=n) for g, n in zip(scaled, names, strict=True)]

    found = run_with_gradient(forward, backward, packed)
    return [compression.decompress(t, c) for t, c in zip(found, contexts, strict=True)]


@_plain
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Any:
    """Blocks until all ranks have called it. In a graph of `tf.compat.v1`, returns an operation."""
    call = Call("barrier", "", process_set)
    if tf.executing_eagerly():
        tensor_ops.run_collective(call, [], name, "HorovodBarrier")
        return None
    done = tensor_ops.add_graph_barrier(call, name or "HorovodBarrier")
    return None if tf.compat.v1.executing_eagerly_outside_functions() else done


def join(device: int = -1) -> int:
    """Raises RefusedError: a rank without data cannot be replaced."""
    raise RefusedError(
        "join() is not there: let all ranks do as many steps. Before the loop, agree on the least: "
        "steps = int(hvd.allreduce(tf.constant(steps), op=hvd.Min)); or repeat() the dataset and "
        "take(steps)."
    )


def _tensor(given: Any) -> tf.Tensor:
    if isinstance(given, tf.IndexedSlices):
        raise NotImplementedError("tf.IndexedSlices came; expected a tensor (tf.convert_to_tensor).")
    is_eager = tf.executing_eagerly() and isinstance(given, tf.Tensor)
    tensor = given if is_eager else tf.convert_to_tensor(given)
    if tensor.dtype.as_datatype_enum in _NO_NUMBERS:
        raise TypeError(
            f"a tensor of {tensor.dtype.name} came; expected numbers or truth values. Texts travel with "
            "hvd.allgather_object() and hvd.broadcast_object()."
        )
    return tensor


def _named(what: str, tensors: Sequence[tf.Tensor]) -> str:
    """Returns a default name. In a graph it contains the names of the first and the last tensor."""
    if tf.executing_eagerly():
        return what
    ends = tensors if len(tensors) == 1 else [tensors[0], tensors[-1]]
    # a captured tensor of a function is named by a number, which differs between ranks
    names = ["captured" if tensor.name[0].isdigit() else tensor.name for tensor in ends]
    return "_".join([what, *(n.replace(":", "_").replace("/", "_") for n in names)])


def _graph_name(name: str) -> str | None:
    return None if tf.executing_eagerly() else name
