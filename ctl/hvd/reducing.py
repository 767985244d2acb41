"""Reduction of gradients over ranks, in a few large exchanges in the order of the variables.

The name of an exchange contains its position instead of the paths of its variables, because a rank that has
created an additional model numbers its layers differently. Error messages contain the paths. Gradients of
layers that only this rank has ("local" gradients) are not exchanged, but divided by the number of ranks:
the other gradients are averages, so a local gradient would be larger by this factor.
"""

import itertools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.collectives import contents
from ctl.errors import UsageError
from ctl.hvd import arguments, ops, process
from ctl.hvd.compression import Compression, check_compression
from ctl.hvd.process_sets import ProcessSet, check_set, global_process_set
from ctl.setting_values import check_type

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
      groups: Number of exchanges, or lists of variables per exchange. None: as few exchanges as
        HOROVOD_FUSION_THRESHOLD (bytes per exchange) allows.
      process_set: Ranks of the exchange. Other ranks keep their gradients.
      device_dense, device_sparse: Device names, passed to the collectives.
      scales_local: If True, divides gradients of local variables by the number of ranks.
    """

    name: str
    op: int = arguments.Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    device_dense: str = ""
    device_sparse: str = ""
    scales_local: bool = True

    def __post_init__(self) -> None:
        arguments.check_reduction(self.op)
        check_compression(self.compression)
        check_set(self.process_set)
        check_type("gradient_predivide_factor", self.predivide, float)
        if self.predivide != 1.0 and self.op != arguments.Average:
            raise UsageError(
                f"gradient_predivide_factor is {self.predivide} with an op other than Average; "
                "expected op=hvd.Average, or no factor."
            )
        is_list = isinstance(self.groups, Sequence) and not isinstance(self.groups, str)
        is_valid = self.groups > 0 if isinstance(self.groups, int) else self.groups is None or is_list
        if not is_valid:
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
        """Exchanges gradients. Collective.

        Args:
          gradients: Gradients of this rank.
          variables: Their variables or sources.
          local: `variable_key` of each variable with a gradient that is not exchanged.
          use_generic_names: If True, the names of the exchanges do not contain `name`.

        Returns:
          The reduced gradients.
        """
        result = [tf.convert_to_tensor(g) if self._should_convert(g) else g for g in gradients]
        if not has_peers_in(self.process_set):
            return result
        is_local = [variable_key(v) in local for v in variables] if local else [False] * len(result)
        shared = [i for i, g in enumerate(result) if g is not None and not is_local[i]]
        for number, bucket in enumerate(self._assign_buckets(result, variables, shared)):
            name = f"grad_{number}" if use_generic_names else f"{self.name}.gradients.{number}"
            contents.set_tensor_names(name, [_variable_name(variables[i]) for i in bucket])
            reduced = self._exchange([result[i] for i in bucket], name)
            for i, gradient in zip(bucket, reduced, strict=True):
                result[i] = gradient
        if self.scales_local:
            for i in (i for i, should_scale in enumerate(is_local) if should_scale):
                result[i] = self._divide_by_ranks(result[i])
        return result

    def __deepcopy__(self, memo: Any) -> "Reduction":
        return self  # frozen; its process set is the registered object

    def _should_convert(self, gradient: Gradient) -> bool:
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

    def _divide_by_ranks(self, gradient: Gradient) -> Gradient:
        if gradient is None:
            return None
        ranks = ops.size_op(process_set_id=self.process_set.process_set_id or 0)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)

    def _assign_buckets(
        self, gradients: Sequence[Gradient], variables: Sequence[Any], shared: Sequence[int]
    ) -> list[list[int]]:
        if self.groups is None:
            return _build_buckets(gradients, shared, process.engine().settings.fusion_threshold)
        if isinstance(self.groups, int):
            index_groups = _split_evenly(shared, self.groups)
        else:
            index_groups = _group_by_lists(self.groups, variables, shared)
        return [bucket for group in index_groups for bucket in _build_buckets(gradients, group, None)]


class Exchange:
    """Exchange of one optimizer's gradients, with accumulation over passes and local variables.

    Args:
      reduction: Settings of the exchange.
      aggregator: Accumulator of several backward passes. None for one pass per exchange.
    """

    def __init__(self, reduction: Reduction, aggregator: Callable | None = None):
        self.reduction = reduction
        self.aggregator: Any = aggregator
        self.local: set[Any] = set()

    def keep_local(self, variable: Any) -> None:
        """Excludes the variable's gradient from the exchange."""
        self.local.add(variable_key(variable))

    @tf.autograph.experimental.do_not_convert
    def __call__(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Exchanges gradients. Collective. With an aggregator, apply them only if `is_due` is True."""

        def reduce(total: Any) -> Any:
            return self.reduction(total, variables, self.local)

        if self.aggregator is None:
            return reduce(gradients)
        if self.reduction.sparse_as_dense:
            gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        return self.aggregator(gradients, variables, reduce)


def variable_key(variable: Any) -> Any:
    """Returns a hashable key for a variable of Keras 3 or TensorFlow, or for a tensor."""
    inner = getattr(variable, "value", variable)
    return (variable if callable(inner) else inner).ref()


def _variable_name(variable: Any) -> str:
    """Returns the path or name of a variable, or "a tensor" for an eager tensor, which has no name."""
    for attribute in ("path", "name"):
        try:
            return str(getattr(variable, attribute))
        except AttributeError:
            continue
    return "a tensor"


def has_peers_in(process_set: ProcessSet) -> bool:
    """Returns True if this rank exchanges gradients in the set. Always True in an elastic job.

    Raises ValueError before `init()`, and UsageError for a set that is not registered.
    """
    ranks = process.size()
    if process_set.process_set_id == 0:
        return ranks > 1 or os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")
    if process_set.process_set_id is None:
        raise UsageError(
            f"{process_set} is not registered; pass it to hvd.init(process_sets=[...]) or to "
            "hvd.add_process_set() first."
        )
    return bool(process_set.included()) and (process_set.size() or 0) > 1


def _build_buckets(
    gradients: Sequence[Gradient], shared: Sequence[int], max_bytes: int | None
) -> list[list[int]]:
    """Builds buckets of dense or of sparse gradients of one dtype, of at most `max_bytes` each."""
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for i in shared:
        group_key = (gradients[i].dtype, isinstance(gradients[i], tf.IndexedSlices))
        bucket, num_bytes = open_buckets.get(group_key, ([], 0))
        size = _num_bytes(gradients[i])
        if not bucket or (max_bytes is not None and num_bytes + size > max_bytes):
            bucket, num_bytes = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[group_key] = bucket, num_bytes + size
    return buckets


def _num_bytes(gradient: Gradient) -> int:
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    return (gradient.shape.num_elements() or 0) * gradient.dtype.size


def _split_evenly(shared: Sequence[int], count: int) -> list[list[int]]:
    """Splits indices into `count` lists in order, with lengths that differ by at most one."""
    quotient, remainder = divmod(len(shared), count)
    ends = [n * quotient + min(n, remainder) for n in range(count + 1)]
    return [list(shared[a:b]) for a, b in itertools.pairwise(ends) if b > a]


def _group_by_lists(
    groups: Sequence[Sequence[Any]], variables: Sequence[Any], shared: Sequence[int]
) -> list[list[int]]:
    """Groups the indices by the lists of variables. Each remaining variable is a separate group."""
    index_by_key = {variable_key(variables[i]): i for i in shared}
    groups_of_indices = [
        [index_by_key.pop(variable_key(v)) for v in group if variable_key(v) in index_by_key]
        for group in groups
    ]
    return [group for group in groups_of_indices if group] + [[i] for i in index_by_key.values()]
