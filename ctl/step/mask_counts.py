"""Number of entries of a mask in all parts of a batch, counted while the first part is traced.

`average(mask=...)` divides by the number of entries in the whole global batch. With `accumulate_steps` the
parts run sequentially, and the first part needs the total. Therefore the operations between the
batch and the mask are repeated for the other parts before the first division.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError

_PURE = {"LookupTableFindV2"}  # stateful for TensorFlow, and always with the same outputs


class MaskCounts:
    """Counts of the masks of a step, in the order in which it calls `average`.

    Args:
      batch: Batch of the first part.
      part: Number of a part, a scalar tensor -> its batch, and `[]` bool that is True if it is a
        placeholder, or None.
      num_parts: Number of parts.
    """

    def __init__(self, batch: Any, part: Callable[[Any], tuple[Any, Any]], num_parts: int):
        self._batch, self._part, self._num_parts = batch, part, num_parts
        self._counts: list[tf.Tensor] = []
        self._next: int | None = None  # index of a count; None in the first part, which computes them

    def begin_next_part(self) -> None:
        """Starts the trace of another part."""
        self._next = 0

    def count(self, mask: Any, is_empty: Any, sum_counts: Callable[[Any], Any]) -> tf.Tensor:
        """Returns the number of True entries of a mask in all parts of all replicas, `[]` float32.

        Args:
          mask: Mask of the current part.
          is_empty: `[]` bool, True if the first part is a placeholder, or None.
          sum_counts: Sums a count over replicas.

        Raises:
          UsageError: If the mask depends on more than the batch.
        """
        if self._next is None:
            self._counts.append(sum_counts(self._count_all(mask, is_empty)))
            return self._counts[-1]
        self._next += 1
        return self._counts[self._next - 1]

    def _count_all(self, mask: Any, is_empty: Any) -> tf.Tensor:
        path = _path(mask, _flat(self._batch))

        def add(i: Any, total: Any) -> tuple[Any, Any]:
            batch, part_is_empty = self._part(i)
            part_mask = _repeated(mask, path, dict(zip(_refs(self._batch), _flat(batch), strict=True)))
            return i + 1, total + _count(part_mask, part_is_empty)

        start = tf.constant(1), _count(mask, is_empty)
        _, total = tf.while_loop(lambda i, _: i < self._num_parts, add, start, parallel_iterations=1)
        return tf.stop_gradient(total)


def _count(mask: Any, is_empty: Any) -> tf.Tensor:
    count = tf.math.count_nonzero(mask, dtype=tf.float32)
    return count if is_empty is None else tf.where(is_empty, 0.0, count)


def _flat(batch: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(batch, expand_composites=True)


def _refs(batch: Any) -> list[Any]:
    return [tensor.ref() for tensor in _flat(batch)]


def _path(mask: Any, batch: list[tf.Tensor]) -> list[tf.Operation]:
    """Returns the operations between the batch and the mask in topological order."""
    ends = {tensor.ref() for tensor in batch}
    if mask.graph is not tf.compat.v1.get_default_graph() or mask.graph is not batch[0].graph:
        raise _not_of_the_batch("is computed, or averaged, within a condition, a loop or a function")
    path: list[tf.Operation] = []
    visited: set[tf.Operation] = set()
    stack = [] if mask.ref() in ends else [(mask.op, False)]
    while stack:
        op, inputs_are_done = stack.pop()
        if inputs_are_done:
            path.append(op)
        elif op not in visited:
            visited.add(op)
            if op.op_def.is_stateful and op.type not in _PURE:
                raise _not_of_the_batch(f"needs the operation {op.type}, {op.name}")
            stack.append((op, True))
            stack += [(t.op, False) for t in op.inputs if t.ref() not in ends]
    return path


def _repeated(mask: Any, path: list[tf.Operation], tensor_by_ref: dict[Any, tf.Tensor]) -> tf.Tensor:
    """Returns the mask of another batch, in the current graph, with the operations in `path`.

    `tensor_by_ref` has the tensors of the other batch by the references of those of the first one.
    """
    for op in path:
        if not any(t.ref() in tensor_by_ref for t in op.inputs):
            continue  # does not depend on the batch
        new = tf.compat.v1.get_default_graph().create_op(
            op.type,
            [tensor_by_ref.get(t.ref(), t) for t in op.inputs],
            [t.dtype for t in op.outputs],
            attrs={name: value for name, value in op.node_def.attr.items() if name != "_output_shapes"},
            op_def=op.op_def,
        )
        outputs = zip(op.outputs, new.outputs, strict=True)
        tensor_by_ref.update({old.ref(): tensor for old, tensor in outputs})
    return tensor_by_ref.get(mask.ref(), mask)


def _not_of_the_batch(reason: str) -> UsageError:
    return UsageError(
        f"average(mask=...) with accumulate_steps: the mask {reason}, so its entries cannot be counted "
        "before the parts of the batch run. Compute it from the batch alone, e.g. mask = words > 0, or "
        "leave accumulate_steps out."
    )
