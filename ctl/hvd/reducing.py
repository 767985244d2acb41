"""Reduction of gradients over ranks, in a few large exchanges in the order of the variables.

Exchanges are named by position and not by the paths of variables, because a rank that has created one more
model numbers its layers differently. Error messages name the variables nevertheless. Gradients of layers
that only this rank has ("local" ones) are not exchanged but divided by the number of ranks: the other
gradients are averages, and a sum of losses over ranks has a local gradient that is larger by that factor.
"""

import itertools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.collectives import contents
from ctl.errors import UsageError
from ctl.hvd import ops, process
from ctl.hvd.compression import Compression
from ctl.hvd.process_sets import ProcessSet, global_process_set

Gradient = Any  # tf.Tensor, tf.IndexedSlices, or None without a gradient


@dataclass(frozen=True, eq=False)
class Reduction:
    """Settings for the exchange of the gradients of an optimizer or a tape.

    Attributes:
      name: Prefix of the names of the exchanges, the same on all ranks.
      op: Average or Sum. A tape may also use Min, Max, Product.
      compression: Compression of dense gradients.
      sparse_as_dense: If True, converts IndexedSlices to tensors first.
      predivide: Scales an average by 1 / predivide before the sum, and by predivide / size after it.
      groups: Number of exchanges, or lists of variables per exchange. None for as few as
        HOROVOD_FUSION_THRESHOLD bytes per exchange allow.
      process_set: Ranks of the exchange. Other ranks keep their gradients.
      device_dense, device_sparse: Device names, passed to the collectives.
      scales_local: If True, divides gradients of local variables by the number of ranks.
    """

    name: str
    op: int = ops.Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    device_dense: str = ""
    device_sparse: str = ""
    scales_local: bool = True

    def __post_init__(self) -> None:
        ops.checked_reduction(self.op)
        if self.predivide != 1.0 and self.op != ops.Average:
            raise UsageError(
                f"gradient_predivide_factor is {self.predivide} with another op than Average; "
                "expected op=hvd.Average, or no factor."
            )
        if isinstance(self.groups, int) and self.groups < 1:
            raise UsageError(
                f"groups is {self.groups!r}; expected a number of groups above 0, or a list of lists "
                "of variables."
            )

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        local: Collection[Any] = frozenset(),
        use_generic_names: bool = False,
    ) -> list[Gradient]:
        """Returns the exchanged gradients. `local` holds the `key` of variables to leave out."""
        result = [tf.convert_to_tensor(g) if self._becomes_dense(g) else g for g in gradients]
        if not has_peers_in(self.process_set):
            return result
        mine = [key(v) in local for v in variables] if local else [False] * len(result)
        shared = [i for i, g in enumerate(result) if g is not None and not mine[i]]
        for number, bucket in enumerate(self._buckets(result, variables, shared)):
            name = f"grad_{number}" if use_generic_names else f"{self.name}.gradients.{number}"
            contents.set_tensor_names(name, [_path(variables[i]) for i in bucket])
            reduced = self._exchange([result[i] for i in bucket], name)
            for i, gradient in zip(bucket, reduced, strict=True):
                result[i] = gradient
        if self.scales_local:
            for i in (i for i, is_mine in enumerate(mine) if is_mine):
                result[i] = self._over_ranks(result[i])
        return result

    def __deepcopy__(self, memo: Any) -> "Reduction":
        return self  # frozen; its process set is the registered object

    def _becomes_dense(self, gradient: Gradient) -> bool:
        return self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices)

    def _exchange(self, gradients: list[Gradient], name: str) -> list[Gradient]:
        is_dense = not isinstance(gradients[0], tf.IndexedSlices)
        is_divided = is_dense and self.predivide != 1.0
        return ops.grouped_allreduce(
            gradients,
            device_dense=self.device_dense,
            device_sparse=self.device_sparse,
            compression=self.compression if is_dense else Compression.none,
            op=self.op,
            prescale_factor=1.0 / self.predivide if is_divided else 1.0,
            postscale_factor=self.predivide if is_divided else 1.0,
            name=name,
            process_set=self.process_set,
            ignore_name_scope=True,
        )

    def _over_ranks(self, gradient: Gradient) -> Gradient:
        if gradient is None:
            return None
        ranks = ops.size_op(process_set_id=self.process_set.process_set_id or 0)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)

    def _buckets(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], shared: Sequence[int]
    ) -> list[list[int]]:
        if self.groups is None:
            return _fused(gradients, shared, process.engine().settings.fusion_threshold)
        if isinstance(self.groups, int):
            together = _dealt(shared, self.groups)
        else:
            together = _grouped(self.groups, variables, shared)
        return [bucket for group in together for bucket in _fused(gradients, group, None)]


class Exchange:
    """Exchange of one optimizer's gradients, with accumulation over passes and local variables.

    Args:
      reduction: Settings of the exchange.
      aggregator: Accumulates several backward passes first. None if there is only one.
    """

    def __init__(self, reduction: Reduction, aggregator: Callable | None = None):
        self.reduction = reduction
        self.aggregator: Any = aggregator
        self.local: set[Any] = set()

    def keep_local(self, variable: Any) -> None:
        """Excludes the variable's gradient from the exchange."""
        self.local.add(key(variable))

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Returns the gradients to apply if the aggregator's `is_due` is true."""

        def reduce(total: Any) -> Any:
            return self.reduction(total, variables, self.local)

        if self.aggregator is None:
            return reduce(gradients)
        if self.reduction.sparse_as_dense:
            gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        return self.aggregator(gradients, variables, reduce)


def key(variable: Any) -> Any:
    """Returns a key that is equal for equal variables, of Keras 3 or TensorFlow, and for equal tensors."""
    inner = getattr(variable, "value", variable)
    return (variable if callable(inner) else inner).ref()


def _path(variable: Any) -> str:
    """Returns the name of a variable in Keras or TensorFlow. An eager tensor has no name."""
    for attribute in ("path", "name"):
        try:
            return str(getattr(variable, attribute))
        except AttributeError:
            continue
    return "a tensor"


def has_peers_in(process_set: ProcessSet) -> bool:
    """Returns True if this rank exchanges gradients in the set. A rank of an elastic job always does.

    Raises ValueError before `init()`, and for a set that is not registered.
    """
    ranks = process.size()
    if process_set.process_set_id == 0:
        return ranks > 1 or os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")
    if process_set.process_set_id is None:
        raise UsageError(
            f"{process_set} is not known; expected it in hvd.init(process_sets=[...]), or in "
            "hvd.add_process_set() before."
        )
    return bool(process_set.included()) and (process_set.size() or 0) > 1


def _fused(gradients: Sequence[Gradient], shared: Sequence[int], most_bytes: int | None) -> list[list[int]]:
    """Returns buckets of gradients of one type, dense or sparse, each of at most `most_bytes`."""
    buckets: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}
    for i in shared:
        kind = (gradients[i].dtype, isinstance(gradients[i], tf.IndexedSlices))
        bucket, used = open_.get(kind, ([], 0))
        size = _bytes(gradients[i])
        if not bucket or (most_bytes is not None and used + size > most_bytes):
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_[kind] = bucket, used + size
    return buckets


def _bytes(gradient: Gradient) -> int:
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return (gradient.shape.num_elements() or 0) * gradient.dtype.size


def _dealt(shared: Sequence[int], count: int) -> list[list[int]]:
    """Returns `count` lists in order, with lengths that differ by at most one."""
    each, more = divmod(len(shared), count)
    ends = [n * each + min(n, more) for n in range(count + 1)]
    return [list(shared[a:b]) for a, b in itertools.pairwise(ends) if b > a]


def _grouped(
    groups: Sequence[Sequence[Any]], variables: Sequence[Any], shared: Sequence[int]
) -> list[list[int]]:
    """Returns the indices grouped by the lists of variables. Each remaining variable is its own group."""
    place = {key(variables[i]): i for i in shared}
    taken = [[place.pop(key(v)) for v in group if key(v) in place] for group in groups]
    return [group for group in taken if group] + [[i] for i in place.values()]
