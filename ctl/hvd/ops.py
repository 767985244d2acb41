"""Collectives on tensors with Horovod's API.

The collectives run eagerly, or as nodes of a `tf.function` or a graph, and have gradients. `name` pairs the
calls of different ranks (default: type and order). `process_set` are the participating ranks. Device
arguments are ignored. Every rank raises tf.errors.FailedPreconditionError for inconsistent calls,
InvalidArgumentError for invalid splits, HorovodInternalError for a lost rank, or ValueError.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from ctl.collectives import arithmetic, tensor_ops
from ctl.collectives.calls import Call
from ctl.collectives.gradients import run_with_gradient
from ctl.hvd.arguments import (
    Average,
    Sum,
    check_reduction,
    default_name,
    graph_name,
    handle_average_backwards_compatibility,
    to_tensor,
)
from ctl.hvd.compression import Compression, effective_compression
from ctl.hvd.errors import RefusedError
from ctl.hvd.process_sets import ProcessSet, check_set, global_process_set, resolve_process_set
from ctl.hvd.run_time import index_op, rank_op, size_op

_do_not_convert = tf.autograph.experimental.do_not_convert


@_do_not_convert
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
    """Returns a tensor of the same shape, reduced elementwise over ranks. Integers are rounded towards 0.

    Args:
      tensor: Tensor, or `tf.IndexedSlices`, which are gathered and support Sum and Average only.
      average: Deprecated. False is `op=Sum`.
      device_dense: Ignored.
      device_sparse: Ignored.
      compression: Compression of dense tensors that are sent through a network.
      op: Average (default), Sum, Min, Max or Product.
      prescale_factor: Factor of the tensor before the reduction.
      postscale_factor: Factor of the result.
      name: Name that pairs the calls of different ranks. Default: type and order of the calls.
      process_set: Participating ranks.
      ignore_name_scope: True to omit the name scope of a graph from the name.
    """
    results = grouped_allreduce(
        [tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
        process_set, ignore_name_scope, name, _name_prefix="HorovodAllreduce",
    )  # fmt: skip
    return results[0]


@_do_not_convert
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
    _name_prefix: str = "HorovodGroupedAllreduce",
) -> list[Any]:
    """Returns `allreduce` of each of several tensors, of any types and shapes, in one exchange.

    Args:
      tensors: Tensors or `tf.IndexedSlices`. The other arguments are those of `allreduce`.
      average: Deprecated. False is `op=Sum`.
      device_dense: Ignored.
      device_sparse: Ignored.
      compression: Compression of dense tensors that are sent through a network.
      op: Average (default), Sum, Min, Max or Product.
      prescale_factor: Factor of the tensors before the reduction.
      postscale_factor: Factor of the results.
      process_set: Participating ranks.
      ignore_name_scope: True to omit the name scope of a graph from the name.
      name: Name that pairs the calls of different ranks.
    """
    op = handle_average_backwards_compatibility(op, average)
    if not len(tensors):
        return list(tensors)
    results: list[Any] = list(tensors)
    sparse = [i for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    if sparse:
        _check_sparse(op, prescale_factor, postscale_factor)
        slices = [tensors[i] for i in sparse]
        reduced = _allreduce_slices(slices, op, process_set, name and f"{name}.sparse")
        for i, reduced_slices in zip(sparse, reduced, strict=True):
            results[i] = reduced_slices
    if dense:
        dense_tensors = [to_tensor(tensors[i]) for i in dense]
        default = default_name(_name_prefix, dense_tensors)
        compression = effective_compression(compression)
        packed, contexts = zip(*[compression.compress(t) for t in dense_tensors], strict=True)
        call = Call(
            "allreduce", "", check_set(process_set), op, prescale_factor, postscale_factor,
            ignores_scope=ignore_name_scope, fuses=_name_prefix == "HorovodAllreduce",
        )  # fmt: skip
        reduced = _allreduce_dense(call, packed, name, default)
        for i, tensor, context in zip(dense, reduced, contexts, strict=True):
            results[i] = compression.decompress(tensor, context)
    return results


def _check_sparse(op: int, prescale: float, postscale: float) -> None:
    if op not in (Sum, Average):
        raise NotImplementedError(
            f"allreduce got tf.IndexedSlices with op={arithmetic.OPS[op]}; expected Sum or Average, or a "
            "dense tensor (tf.convert_to_tensor)."
        )
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError(
            "prescale_factor and postscale_factor do not support tf.IndexedSlices; scale its values."
        )


def _allreduce_slices(slices: Any, op: int, process_set: Any, name: str | None) -> list[tf.IndexedSlices]:
    """Gathers all values and indices in one exchange."""
    parts = [part for indexed_slices in slices for part in (indexed_slices.values, indexed_slices.indices)]
    gathered = iter(grouped_allgather(parts, process_set=process_set, name=name))
    results = []
    for indexed_slices in slices:
        values, indices = next(gathered), next(gathered)
        if op == Average:
            values = values / tf.cast(size_op(process_set.process_set_id or 0), values.dtype)
        results.append(tf.IndexedSlices(values, indices, dense_shape=indexed_slices.dense_shape))
    return results


def _allreduce_dense(call: Call, tensors: Any, name: Any, default: Any) -> list[Any]:
    def backward(_: Any, *gradients: Any) -> Any:
        if call.op not in (Sum, Average):
            raise RefusedError(
                f"allreduce with op={arithmetic.OPS[call.op]} has no gradient; expected hvd.Sum or "
                "hvd.Average. Wrap the tensor in tf.stop_gradient() if it needs no gradient."
            )
        dense = [tf.convert_to_tensor(g) for g in gradients]
        return _allreduce_dense(call, dense, None, f"{default}_grad")

    def forward(*inputs: Any) -> Any:
        return tensor_ops.run_collective(call, inputs, name, default)

    return run_with_gradient(forward, backward, tensors)


@_do_not_convert
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenates the tensors of all ranks in rank order.

    Args:
      tensor: Tensor `[n, ...]`; n may differ between ranks, and may be 0.
      name: Name that pairs the calls of different ranks. Default: type and order of the calls.
      ignore_name_scope: True to omit the name scope of a graph from the name.
      process_set: Participating ranks.
    """
    return _allgather_tensors([tensor], "HorovodAllgather", name, ignore_name_scope, process_set)[0]


@_do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Returns the `allgather` of several tensors in one exchange.

    Args:
      tensors: Tensors `[n, ...]` of any types.
      name: Name that pairs the calls of different ranks. Default: type and order of the calls.
      ignore_name_scope: True to omit the name scope of a graph from the name.
      process_set: Participating ranks.
    """
    if not len(tensors):
        return list(tensors)
    return _allgather_tensors(tensors, "HorovodGroupedAllgather", name, ignore_name_scope, process_set)


def _allgather_tensors(
    tensors: Any, name_prefix: Any, name: Any, ignore_name_scope: Any, process_set: Any
) -> list[tf.Tensor]:
    inputs = [to_tensor(t) for t in tensors]
    default = default_name(name_prefix, inputs)
    call = Call("allgather", "", check_set(process_set), ignores_scope=ignore_name_scope)

    def forward(*tensors_to_send: Any) -> Any:
        return tensor_ops.run_collective(call, tensors_to_send, name, default)

    def backward(outputs: Any, *gradients: Any) -> Any:
        *_, rows = outputs
        means = [
            allreduce(g, op=Average, process_set=process_set, name=graph_name(f"{default}_grad{i}"))
            for i, g in enumerate(gradients[:-1])
        ]
        return [_slice_own_rows(mean, rows[:, i], process_set) for i, mean in enumerate(means)]

    return run_with_gradient(forward, backward, inputs)[:-1]


def _slice_own_rows(tensor: Any, rows: Any, process_set: Any) -> Any:
    me = index_op(process_set)
    start = tf.reduce_sum(rows[:me])
    return tensor[start : start + rows[me]]


@_do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the tensor of one rank on every rank.

    Args:
      tensor: Tensor with the same shape and type on all ranks.
      root_rank: Rank in the job, also with a process set.
      name: Name that pairs the calls of different ranks. Default: type and order of the calls.
      ignore_name_scope: True to omit the name scope of a graph from the name.
      process_set: Participating ranks.
    """
    input_tensor = to_tensor(tensor)
    default = default_name("HorovodBroadcast", [input_tensor])
    call = Call("broadcast", "", check_set(process_set), root=root_rank, ignores_scope=ignore_name_scope)

    def forward(tensor_to_send: Any) -> Any:
        return tensor_ops.run_collective(call, [tensor_to_send], name, default)

    def backward(_: Any, gradient: Any) -> Any:
        mean = allreduce(gradient, op=Average, process_set=process_set, name=graph_name(f"{default}_grad"))
        return [mean * tf.cast(tf.equal(rank_op(), root_rank), mean.dtype)]

    return run_with_gradient(forward, backward, [input_tensor])[0]


@_do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to each rank, and receives rows from each rank.

    Args:
      tensor: Tensor `[n, ...]` with the rows to send, in rank order.
      splits: Number of rows to send to each rank, `[ranks]` integers. None: equal numbers.
      name: Name that pairs the calls of different ranks. Default: type and order of the calls.
      ignore_name_scope: True to omit the name scope of a graph from the name.
      process_set: Participating ranks.

    Returns:
      The received rows in rank order and, with `splits`, the rows from each rank, `[ranks]` int32.
    """
    inputs = [to_tensor(tensor)]
    default = default_name("HorovodAlltoall", inputs)
    if splits is not None:
        counts = tf.convert_to_tensor(splits)
        if not counts.dtype.is_integer:
            raise ValueError(f"splits has the type {counts.dtype.name}; expected integers.")
        inputs.append(tf.cast(counts, tf.int32))
    process_set, has_splits = check_set(process_set), splits is not None
    call = Call("alltoall", "", process_set, has_splits=has_splits, ignores_scope=ignore_name_scope)

    def forward(*tensors_to_send: Any) -> Any:
        return tensor_ops.run_collective(call, tensors_to_send, name, default)

    def backward(outputs: Any, gradient: Any, _: Any) -> Any:
        returned_gradient, _ = alltoall(
            gradient, outputs[1], process_set=process_set, name=graph_name(f"{default}_grad")
        )
        return [returned_gradient] if splits is None else [returned_gradient, None]

    received, rows = run_with_gradient(forward, backward, inputs)
    return received if splits is None else (received, rows)


@_do_not_convert
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
    """Reduces a tensor over ranks and returns the rows of this rank. The first ranks get the remainder.

    Args:
      tensor: Tensor `[n, ...]` with the same shape on all ranks.
      device_dense: Ignored.
      compression: Compression of tensors that are sent through a network.
      op: Average, Sum, Min, Max or Product.
      name: Name that pairs the calls of different ranks. Default: type and order of the calls.
      process_set: Participating ranks.
      ignore_name_scope: True to omit the name scope of a graph from the name.
      prescale_factor: Factor of the tensor before the reduction.
      postscale_factor: Factor of the result.
    """
    results = grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, prescale_factor, postscale_factor, name,
        ignore_name_scope, _name_prefix="HorovodReducescatter",
    )  # fmt: skip
    return results[0]


@_do_not_convert
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
    _name_prefix: str = "HorovodGroupedReducescatter",
) -> list[tf.Tensor]:
    """Returns the `reducescatter` of several tensors in one exchange. See there for the arguments."""
    op = check_reduction(op)
    if not len(tensors):
        return list(tensors)
    inputs = [to_tensor(t) for t in tensors]
    default = default_name(_name_prefix, inputs)
    call = Call("reducescatter", "", check_set(process_set), op, prescale_factor, postscale_factor)
    call = replace(call, ignores_scope=ignore_name_scope)
    compression = effective_compression(compression)
    packed, contexts = zip(*[compression.compress(t) for t in inputs], strict=True)

    def forward(*tensors_to_send: Any) -> Any:
        return tensor_ops.run_collective(call, tensors_to_send, name, default)

    def backward(_: Any, *gradients: Any) -> Any:
        factor = prescale_factor * postscale_factor
        if op == Sum:
            factor = factor * len(resolve_process_set(process_set)[1])
        names = [graph_name(f"{default}_grad{i}") for i in range(len(gradients))]
        scaled = [g * tf.cast(factor, g.dtype) for g in gradients]
        return [allgather(g, process_set=process_set, name=n) for g, n in zip(scaled, names, strict=True)]

    results = run_with_gradient(forward, backward, packed)
    return [compression.decompress(t, c) for t, c in zip(results, contexts, strict=True)]


@_do_not_convert
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Any:
    """Blocks until all ranks have called it. In a graph of `tf.compat.v1` it returns an operation.

    Args:
      process_set: Participating ranks.
      name: Name that pairs the calls of different ranks.
    """
    call = Call("barrier", "", check_set(process_set))
    if tf.executing_eagerly():
        tensor_ops.run_collective(call, [], name, "HorovodBarrier")
        return None
    operation = tensor_ops.add_graph_barrier(call, name or "HorovodBarrier")
    return None if tf.compat.v1.executing_eagerly_outside_functions() else operation


def join(device: int = -1) -> int:
    """Raises RefusedError, because all ranks must run the same number of steps."""
    raise RefusedError(
        "join() is not supported: all ranks must run the same number of steps. Compute the minimum before "
        "the loop: steps = int(hvd.allreduce(tf.constant(steps), op=hvd.Min)); or call repeat() and "
        "take(steps) on the dataset."
    )
