"""How many entries a mask has in all parts of a batch, found while the first part is traced.

`average(mask=...)` divides by the entries of the whole global batch. With `accumulate_steps` the parts
run one after the other, and the first needs the count of all. So the operations between the batch and
the mask, and only those, are repeated for the other parts before the first one divides.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError

_PURE = {"LookupTableFindV2"}  # stateful for TensorFlow, and always with the same outputs


class MaskCounts:
    """The counts of a step's masks, in the order in which it calls `average`.

    Args:
      batch: of the first part, as the step gets it.
      part: number of a part, a scalar tensor -> its batch, and whether that has no example, or None.
      parts: how many there are.
    """

    def __init__(self, batch: Any, part: Callable[[Any], tuple[Any, Any]], parts: int):
        self._batch, self._part, self._parts = batch, part, parts
        self._counts: list[tf.Tensor] = []
        self._next: int | None = None  # of the counts; None in the first part, which finds them

    def begin_next_part(self) -> None:
        """The step is traced again, for another part."""
        self._next = 0

    def count(self, mask: Any, empty: Any, everywhere: Callable[[Any], Any]) -> tf.Tensor:
        """True entries of this mask in all parts of all replicas, `[]` float32.

        `empty` is whether the first part has no example, or None; `everywhere` sums over replicas. Raises
        UsageError for a mask that does not come from the batch alone.
        """
        if self._next is None:
            self._counts.append(everywhere(self._count_all(mask, empty)))
            return self._counts[-1]
        self._next += 1
        return self._counts[self._next - 1]

    def _count_all(self, mask: Any, empty: Any) -> tf.Tensor:
        path = _path(mask, _flat(self._batch))

        def add(i: Any, total: Any) -> tuple[Any, Any]:
            batch, none = self._part(i)
            again = _repeated(mask, path, dict(zip(_refs(self._batch), _flat(batch), strict=True)))
            return i + 1, total + _count(again, none)

        _, total = tf.while_loop(
            lambda i, _: i < self._parts, add, (tf.constant(1), _count(mask, empty)), parallel_iterations=1
        )
        return tf.stop_gradient(total)


def _count(mask: Any, empty: Any) -> tf.Tensor:
    count = tf.math.count_nonzero(mask, dtype=tf.float32)
    return count if empty is None else tf.where(empty, 0.0, count)


def _flat(batch: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(batch, expand_composites=True)


def _refs(batch: Any) -> list[Any]:
    return [tensor.ref() for tensor in _flat(batch)]


def _path(mask: Any, batch: list[tf.Tensor]) -> list[tf.Operation]:
    """The operations that make the mask from the batch, each after those that it needs."""
    ends = {tensor.ref() for tensor in batch}
    if mask.graph is not tf.compat.v1.get_default_graph() or mask.graph is not batch[0].graph:
        raise _not_of_the_batch("is computed, or averaged, within a condition, a loop or a function")
    path: list[tf.Operation] = []
    seen: set[tf.Operation] = set()
    stack = [] if mask.ref() in ends else [(mask.op, False)]
    while stack:
        op, inputs_are_done = stack.pop()
        if inputs_are_done:
            path.append(op)
        elif op not in seen:
            seen.add(op)
            if op.op_def.is_stateful and op.type not in _PURE:
                raise _not_of_the_batch(f"needs the operation {op.type}, {op.name}")
            stack.append((op, True))
            stack += [(t.op, False) for t in op.inputs if t.ref() not in ends]
    return path


def _repeated(mask: Any, path: list[tf.Operation], made: dict[Any, tf.Tensor]) -> tf.Tensor:
    """The mask of another batch, in the current graph; `made`: tensors of the first batch -> of this."""
    for op in path:
        if not any(t.ref() in made for t in op.inputs):
            continue  # does not depend on the batch
        new = tf.compat.v1.get_default_graph().create_op(
            op.type,
            [made.get(t.ref(), t) for t in op.inputs],
            [t.dtype for t in op.outputs],
            attrs={name: value for name, value in op.node_def.attr.items() if name != "_output_shapes"},
            op_def=op.op_def,
        )
        made.update({old.ref(): tensor for old, tensor in zip(op.outputs, new.outputs, strict=True)})
    return made.get(mask.ref(), mask)


def _not_of_the_batch(how: str) -> UsageError:
    return UsageError(
        f"average(mask=...) with accumulate_steps: the mask {how}, so its entries cannot be counted before "
        "the parts of the batch run. Compute it from the batch alone, e.g. mask = words > 0, or leave "
        "accumulate_steps out."
    )
