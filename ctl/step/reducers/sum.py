"""Sum of gradients over replicas: one all-reduce for dense gradients, one for embeddings of a shape.

The sum is made before clipping, so that clipping applies to the global gradient. The flags of losses and
gradients that are not finite are part of the same all-reduce. With the engine the flags of gradients are
computed and summed only if the norm of the sums is not finite.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ctl.distribute import replica_sum
from ctl.distribute.engine_all_reduce import engine_of, sum_flags, wire_dtype_of
from ctl.step import finiteness
from ctl.step.context import StepContext
from ctl.step.reducers.reducer import GradientReducer, ReducedGradients, timed_exchange
from ctl.step.reducers.sparse_rows import SparseSum, can_sum, merged, without_no_row
from ctl.step.update_request import UpdateRequest


class SumReducer(GradientReducer):
    """Sums gradients over all replicas in each step. One replica keeps its gradients."""

    def reduce(self, request: UpdateRequest, context: StepContext) -> ReducedGradients:
        """Returns the sums of the gradients over all replicas."""
        if tf.distribute.get_replica_context().num_replicas_in_sync == 1:
            return ReducedGradients(existing_rows(request))
        exchange = lambda: self._exchange(request, context)  # noqa: E731
        return ReducedGradients(*timed_exchange(context.timer, request.gradients, exchange))

    def _exchange(self, request: UpdateRequest, context: StepContext) -> tuple[list, Any, list]:
        """Returns the fields of `ReducedGradients`."""
        strategy = tf.distribute.get_strategy()
        if engine_of(strategy) is None or any(isinstance(g, tf.IndexedSlices) for g in request.gradients):
            return *sum_gradients(request, context, suspects_of(request)), []
        gradients, flags = sum_gradients(request, context, suspects_of(selected(request, [])))
        # in each step, a pass over the gradients of this replica would take 1 ms for 11 MB
        find = lambda: sum_flags(strategy, suspects_of(request))  # noqa: E731
        return gradients, lambda norm: tf.cond(tf.math.is_finite(norm), lambda: flags, find), []


def suspects_of(request: UpdateRequest) -> tf.Tensor:
    """Returns the flags of this replica in an update, to be summed over replicas."""
    replica = tf.distribute.get_replica_context()
    number, count = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    return finiteness.suspects(list(request.gradients), request.loss_flag, number, count)


def existing_rows(request: UpdateRequest) -> list:
    """Returns the gradients of this replica without rows that have the index NO_ROW."""
    if not request.may_lack_rows:
        return list(request.gradients)
    return [without_no_row(g) if isinstance(g, tf.IndexedSlices) else g for g in request.gradients]


def sum_gradients(
    request: UpdateRequest, context: StepContext, suspects: tf.Tensor
) -> tuple[list, tf.Tensor]:
    """Sums the gradients of a request and flags over replicas, in replica context.

    Returns:
      The summed gradients, and the summed flags.
    """
    gradients = list(request.gradients)
    tables, indices_by_table = _tables(request, context)
    sparse = {i for indices in indices_by_table for i in indices}
    dense = [i for i in range(len(gradients)) if i not in sparse]
    votes = [t.size_vote() for t in tables if t.must_agree]
    *totals, suspects = sum_over_replicas(
        [*votes, *(tf.convert_to_tensor(gradients[i]) for i in dense), suspects],
        context.settings.cast_dtype,
    )
    summed_votes = iter(totals[: len(votes)])
    for i, total in zip(dense, totals[len(votes) :], strict=True):
        gradients[i] = total
    for table, indices in zip(tables, indices_by_table, strict=True):
        rows = table.summed(next(summed_votes) if table.must_agree else None)
        for i, total in zip(indices, rows, strict=True):
            is_unique = bool(request.has_unique_rows) and request.has_unique_rows[i]
            gradients[i] = merged(total) if is_unique else total
    return gradients, suspects


def _tables(request: UpdateRequest, context: StepContext) -> tuple[list[SparseSum], list[list[int]]]:
    """Groups sparse gradients with equal rows into tables; returns the tables and the indices of each."""
    groups: dict[tuple, list[int]] = {}
    for i, (g, v) in enumerate(zip(request.gradients, request.variables, strict=True)):
        if can_sum(g, v):
            is_unique = bool(request.has_unique_rows) and request.has_unique_rows[i]
            merges = context.settings.merge_rows or is_unique
            groups.setdefault((merges, g.dtype, tuple(g.values.shape[1:])), []).append(i)
    num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    tables = [
        SparseSum(
            [request.gradients[i] for i in indices],
            [request.variables[i].shape[0] for i in indices],
            num_replicas,
            merge=merges,
            even=context.has_even_shapes,
        )
        for (merges, *_), indices in groups.items()
    ]
    return tables, list(groups.values())


def selected(request: UpdateRequest, indices: Sequence[int]) -> UpdateRequest:
    """Returns the request with only the gradients at `indices`."""
    unique = request.has_unique_rows
    return dataclasses.replace(
        request,
        gradients=[request.gradients[i] for i in indices],
        variables=[request.variables[i] for i in indices],
        has_unique_rows=[unique[i] for i in indices] if unique else (),
    )


def sum_over_replicas(tensors: Sequence[Any], wire_dtype: str | None = None) -> list:
    """Sums dense tensors over replicas, in replica context, with one collective per dtype.

    Args:
      tensors: Dense tensors of any shapes.
      wire_dtype: Floating-point type in which floating-point tensors travel. None: their own.
    """
    context = tf.distribute.get_replica_context()
    wire_dtype = wire_dtype_of(context.strategy, wire_dtype)
    sums: list = [None] * len(tensors)
    indices_by_dtype: dict[tf.DType, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices_by_dtype.setdefault(tensor.dtype, []).append(i)
    for dtype, indices in indices_by_dtype.items():
        wire = tf.as_dtype(wire_dtype) if wire_dtype and dtype.is_floating else dtype
        parts = [tf.cast(tensors[i], wire) for i in indices]
        for i, total in zip(indices, _sum_together(context, parts), strict=True):
            sums[i] = tf.cast(total, dtype)
    return sums


def _sum_together(context: Any, parts: list) -> list:
    """Sums tensors of one dtype with one collective."""
    if engine_of(context.strategy) is not None:  # it sums each tensor in its own memory
        totals: list = replica_sum.sum_over_all_replicas(parts)
        return totals
    flat = tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)
    total = replica_sum.sum_over_all_replicas(flat)
    pieces = tf.split(total, [_size(part) for part in parts])
    return [tf.reshape(piece, tf.shape(part)) for piece, part in zip(pieces, parts, strict=True)]


def _size(tensor: tf.Tensor) -> Any:
    size = tensor.shape.num_elements()
    return tf.size(tensor) if size is None else size
