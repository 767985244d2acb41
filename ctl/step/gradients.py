"""The gradient path: sum over replicas once, check, clip, apply once.

`ctl` owns the sum over replicas. Keras 3 clips each replica's part *before* its sum, and its
accumulation does not run in a distributed step; here clipping sees the global gradient, the finite
check needs no extra communication (the sum of anything not finite is not finite, on every replica
alike), and the optimizer is kept from summing a second time.
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.distribute import replica_sum
from ctl.distribute.engine_all_reduce import engine_of, wire_dtype_of
from ctl.errors import UsageError
from ctl.step import finiteness, optimizers, update_lock
from ctl.step.eight_bit import EightBitSums, keep_left_over
from ctl.step.sparse_sum import NO_ROW, SparseSum, can_sum, has_unique_rows, merged, without_no_row
from ctl.step.step_times import StepTimes

_SMALL = 100_000  # elements; below, one concatenation is cheaper than a norm per variable
_LOWEST_SCALE = 2.0**-14  # of the loss; if even this overflows, the numbers themselves are at fault
_WIRE_DTYPES = (None, "bfloat16", "float16", "int8")


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """How gradients become an update. Set `self.gradients` in `build`.

    Attributes:
      clip_norm: largest global norm of the summed gradient; larger ones are scaled down. None: off.
      accumulate_steps: parts into which a replica's batch is split; their gradients are added up
        before the one update, so a large batch fits into little memory.
      wire_dtype: "bfloat16" or "float16" halves what travels between replicas, other than through memory
        that all workers share; None sends as is. "int8" is a quarter, between workers with one replica
        each: what it rounds away is added in the next step.
      on_nonfinite: what a loss or gradient does that is NaN or infinite anywhere: "stop" ends the run,
        "skip" leaves the step out, "rollback" goes back to the newest checkpoint and on with other data.
      merge_rows: rows that come several times in a sparse gradient are added up before the optimizer
        sees them, as if it were dense. Keras 3's Adam by itself squares each of them alone.
    """

    clip_norm: float | None = None
    accumulate_steps: int = 1
    wire_dtype: str | None = None
    merge_rows: bool = True
    on_nonfinite: str = "stop"

    def __post_init__(self) -> None:
        number = isinstance(self.clip_norm, numbers.Real)
        if self.clip_norm is not None and not (number and self.clip_norm > 0):
            raise UsageError(f"clip_norm is {self.clip_norm!r}; expected a number > 0, or None.")
        n = self.accumulate_steps
        if isinstance(n, bool) or not isinstance(n, numbers.Integral) or int(n) < 1:
            raise UsageError(f"accumulate_steps is {n!r}; expected a whole number >= 1.")
        if self.wire_dtype not in _WIRE_DTYPES:
            raise UsageError(
                f"wire_dtype is {self.wire_dtype!r}; expected 'bfloat16', 'float16', 'int8' or None."
            )
        finiteness.check_policy(self.on_nonfinite)


@dataclass
class Update:
    """One call of `minimize`: gradients that wait to be applied to variables by an optimizer.

    `gradients` has one more than `variables`: a flag, 1 where this replica's loss is not finite.
    `when` is a truth value, equal on all replicas, of whether this step applies them; None: always.
    `good`, once applied: whether all was finite, if the step is left out otherwise.
    `label`: name of the optimizer in reports, nothing for `self.optimizer`.
    """

    gradients: list
    variables: list
    optimizer: Any
    when: Any = None
    good: Any = None
    found: Any = None  # by whom, see finiteness.suspects
    may_be_empty: bool = False  # sparse gradients may have rows of index NO_ROW
    even: bool = False  # static shapes are the same on all replicas
    label: str = ""
    local: bool = False  # of this worker's own step: not summed over replicas
    in_program: bool = False  # within XLA nothing can be raised: what would stop is kept in `stop`
    stop: Any = None  # (whether the run goes on, found)
    left_over: Sequence = ()  # for `eight_bit.keep_left_over`
    unique: Sequence[bool] = ()  # of gradients: each row once on this replica


def compute(
    loss: Any,
    tape: tf.GradientTape,
    variables: Sequence,
    optimizer: Any,
    empty: Any = None,
    local_workers: int = 0,
) -> Update:
    """This replica's gradients, scaled as the optimizer wants them; variables without one are left out.

    `empty` is true (a scalar tensor) where the replica has no example: its gradients are zeros, and the
    rows of its sparse ones have the index NO_ROW. `local_workers`: how many make steps of their own, so
    that a share of the global mean becomes the mean of the own share; 0: gradients are summed.

    Raises UsageError if no variable has a gradient, or the loss is not a scalar.
    """
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank != 0:
        raise UsageError(
            f"minimize() got a loss of shape {loss.shape}; expected a scalar. Write "
            "loss = self.average(per_example) inside the tape."
        )
    variables = list(variables)
    scale = optimizers.scale_of(optimizer)
    if local_workers:
        scale = local_workers * (1.0 if scale is None else scale)
    seed = None if scale is None else tf.cast(scale, loss.dtype)
    gradients = tape.gradient(loss, variables, output_gradients=seed)
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not variables:
        raise UsageError(
            "minimize() has no variable to train: the model has no trainable variables. Are all of its "
            "layers frozen (layer.trainable = False)? Leave one trainable, or do not call minimize()."
        )
    if not pairs:
        raise UsageError(
            f"minimize() found no gradient for any of {len(variables)} variables; expected the "
            "loss to depend on them. Compute the loss inside `with tf.GradientTape() as tape:`."
        )
    for gradient, variable in pairs:
        if isinstance(gradient, tf.IndexedSlices) and variable.shape.rank:  # a static shape, if it is known
            gradient.values.set_shape([None, *variable.shape[1:]])
    return new_update(pairs, optimizer, finiteness.flag_of(loss), empty, bool(local_workers))


def new_update(
    pairs: Sequence[tuple[Any, Any]], optimizer: Any, loss_flag: Any, empty: Any = None, local: bool = False
) -> Update:
    """Returns the update of pairs (gradient, variable) of this replica; see `compute` for `empty`."""
    kept, unique = [*(g for g, _ in pairs), loss_flag], [has_unique_rows(g) for g, _ in pairs]
    if empty is not None:
        kept = tf.cond(empty, lambda: [_zeros(g) for g in kept], lambda: kept)
    own, may_be_empty = [v for _, v in pairs], empty is not None
    return Update(kept, own, optimizer, may_be_empty=may_be_empty, local=local, unique=unique)


def _zeros(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        none = tf.fill(tf.shape(gradient.indices), tf.cast(NO_ROW, gradient.indices.dtype))
        return tf.IndexedSlices(tf.zeros_like(gradient.values), none, gradient.dense_shape)
    return tf.zeros_like(gradient)


def apply(
    update: Update, how: Gradients, times: StepTimes | None = None, eight_bit: EightBitSums | None = None
) -> Any:
    """Sums over replicas, checks, clips and applies; returns the global norm `[]` before clipping.

    Under loss scaling, and with `when`, the norm comes with its count: (0, 0) for a step that changed
    nothing; if it was not finite, every replica lowers the scale.

    Called in replica context. Where loss or gradient is not finite on any replica, the policy of `how`
    holds on all of them; "stop" raises InvalidArgumentError with finiteness.MESSAGE as the graph runs.
    `times`: where to add up how long this worker waits in the sum. `eight_bit`: sums what it takes.
    """
    *gradients, loss_flag = update.gradients
    context = tf.distribute.get_replica_context()
    found = None
    replicas = context.num_replicas_in_sync
    if update.local:
        found = finiteness.suspects(gradients, loss_flag, context.replica_id_in_sync_group, replicas)
    if replicas > 1 and not update.local:
        parts = context, gradients, loss_flag, update, how, eight_bit
        act = lambda: _summed(*parts)  # noqa: E731
        asks = engine_of(context.strategy) is not None
        gradients, found = act() if times is None else times.of_sum(gradients, act, asks=asks)
    elif update.may_be_empty:
        gradients = [without_no_row(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    rows_once = [merged(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    gradients = rows_once if how.merge_rows else gradients
    norm, scale = _global_norm(rows_once), optimizers.scale_of(update.optimizer)
    found = finiteness.alone(loss_flag, norm) if found is None else found
    if scale is not None:
        norm /= tf.cast(scale, norm.dtype)
    skips = optimizers.skips_what_is_not_finite(update.optimizer)
    checked = _checked(update, how, norm, found, scale if skips else None)
    if how.clip_norm is not None:
        limit = tf.cast(how.clip_norm, norm.dtype)
        factor = limit / tf.maximum(norm, limit)
        if skips:  # of an infinite norm it would be 0, and the step would count as a finite one
            factor = tf.where(tf.math.is_finite(norm), factor, float("nan"))
        gradients = [_scaled(g, tf.cast(factor, g.dtype)) for g in gradients]
    with tf.control_dependencies(checked), update_lock.held():
        if update.when is None:
            optimizers.apply_without_sum(update.optimizer, gradients, update.variables)
        else:
            _apply_when(update, gradients)
        keep_left_over(update.left_over, update.when)
    with tf.control_dependencies(checked):  # a step that stops the run is not counted
        norm = tf.identity(norm)
    if not skips and update.when is None:
        return norm
    counts = tf.math.is_finite(norm) if skips else tf.constant(True)
    counts &= True if update.when is None else update.when
    return tf.where(counts, norm, tf.zeros_like(norm)), tf.cast(counts, tf.float64)


def _summed(
    context: Any,
    gradients: list,
    loss_flag: Any,
    update: Update,
    how: Gradients,
    eight_bit: EightBitSums | None,
) -> tuple[list, tf.Tensor]:
    """Returns the gradients summed over replicas, and the flags of `finiteness.suspects`.

    One collective for the dense gradients of a dtype; one for all tables whose rows are alike.
    """
    replicas, variables = context.num_replicas_in_sync, update.variables
    mine = finiteness.suspects(gradients, loss_flag, context.replica_id_in_sync_group, replicas)
    sparse: dict[tuple, list[int]] = {}
    for i, (g, v) in enumerate(zip(gradients, variables, strict=True)):
        if can_sum(g, v):
            merges = how.merge_rows or (bool(update.unique) and update.unique[i])
            sparse.setdefault((merges, g.dtype, tuple(g.values.shape[1:])), []).append(i)
    tables = [
        SparseSum(
            [gradients[i] for i in places],
            [variables[i].shape[0] for i in places],
            replicas,
            merge=merges,
            even=update.even,
        )
        for (merges, *_), places in sparse.items()
    ]
    taken = {i for places in sparse.values() for i in places}
    dense = [i for i in range(len(gradients)) if i not in taken]
    rounded = [i for i in dense if eight_bit is not None and eight_bit.takes(gradients[i], variables[i])]
    dense = [i for i in dense if i not in rounded]
    wanted = [t.wanted() for t in tables if t.must_agree]
    *totals, found = sum_over_replicas(
        [*wanted, *(tf.convert_to_tensor(gradients[i]) for i in dense), mine],
        None if how.wire_dtype == "int8" else how.wire_dtype,
    )
    agreed, summed = iter(totals[: len(wanted)]), list(gradients)
    for i, total in zip(dense, totals[len(wanted) :], strict=True):
        summed[i] = total
    for places, table in zip(sparse.values(), tables, strict=True):
        rows = table.summed(next(agreed) if table.must_agree else None)
        for i, total in zip(places, rows, strict=True):
            summed[i] = merged(total) if update.unique and update.unique[i] else total
    if eight_bit is not None and rounded:
        totals, update.left_over = eight_bit.summed(
            [gradients[i] for i in rounded], [variables[i] for i in rounded]
        )
        for i, total in zip(rounded, totals, strict=True):
            summed[i] = total
    return summed, found


def _checked(update: Update, how: Gradients, norm: Any, found: Any, scale: Any) -> list:
    """Acts on what is not finite: what the update must wait for, or a condition in `update`.

    `scale` is that of an optimizer that skips such steps and lowers the scale of the loss, else None.
    """
    if scale is not None:
        fine = (scale >= _LOWEST_SCALE) | tf.math.is_finite(norm)
        if not update.in_program:
            return [finiteness.stop_unless(fine, found)]
        update.stop = fine, found
        update.when = fine if update.when is None else update.when & fine
        return []
    good = finiteness.good(norm, found)
    if how.on_nonfinite == "stop" and update.local:
        update.stop = good, found  # all workers stop at the next average
        return []
    if how.on_nonfinite == "stop" and not update.in_program:
        return [finiteness.stop_unless(good, found)]
    if how.on_nonfinite == "stop":
        update.stop = good, found
    else:
        update.good, update.found = good, found
    update.when = good if update.when is None else update.when & good
    return []


def _apply_when(update: Update, gradients: list) -> None:
    def put(*parts: Any) -> Any:
        optimizers.apply_without_sum(update.optimizer, list(parts), update.variables)
        return tf.constant(0)

    context = tf.distribute.get_replica_context()
    if _conditions_within_replicas():
        tf.cond(update.when, lambda: put(*gradients), lambda: tf.constant(0))
        return

    def across_replicas(strategy: Any, when: Any, *parts: Any) -> None:
        def on_each() -> Any:
            strategy.extended.call_for_each_replica(put, args=parts)
            return tf.constant(0)

        now = strategy.experimental_local_results(when)[0]
        tf.cond(now, on_each, lambda: tf.constant(0))

    context.merge_call(across_replicas, args=(update.when, *gradients))


def _conditions_within_replicas() -> bool:
    """Whether an update may stand in a tf.cond of one replica; MirroredStrategy wants it outside."""
    return tf.__internal__.distribute.strategy_supports_no_merge_call()


def sum_over_replicas(tensors: Sequence[Any], wire_dtype: str | None = None) -> list:
    """Dense tensors summed over replicas, in replica context; together, in one collective per dtype."""
    context = tf.distribute.get_replica_context()
    wire_dtype = wire_dtype_of(context.strategy, wire_dtype)
    reduced: list = [None] * len(tensors)
    dense: dict[tf.DType, list[int]] = {}
    for i, tensor in enumerate(tensors):
        dense.setdefault(tensor.dtype, []).append(i)
    for dtype, places in dense.items():
        wire = tf.as_dtype(wire_dtype) if wire_dtype and dtype.is_floating else dtype
        parts = [tf.cast(tensors[i], wire) for i in places]
        for i, total in zip(places, _summed_together(context, parts), strict=True):
            reduced[i] = tf.cast(total, dtype)
    return reduced


def _summed_together(context: Any, parts: list) -> list:
    if engine_of(context.strategy) is not None:  # which sums each where it lies
        totals: list = replica_sum.sum_over_all_replicas(parts)
        return totals
    flat = tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)
    total = replica_sum.sum_over_all_replicas(flat)
    pieces = tf.split(total, [_size(part) for part in parts])
    return [tf.reshape(piece, tf.shape(part)) for piece, part in zip(pieces, parts, strict=True)]


def _scaled(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _size(tensor: tf.Tensor) -> Any:
    size = tensor.shape.num_elements()
    return tf.size(tensor) if size is None else size


def _static_size(gradient: Any) -> float:
    """Elements of a dense gradient; infinity for what is sparse or of unknown size."""
    if isinstance(gradient, tf.IndexedSlices):
        return float("inf")
    size = gradient.shape.num_elements()
    return float("inf") if size is None else size


def _global_norm(gradients: list) -> tf.Tensor:
    sizes = [_static_size(g) for g in gradients]
    same = len({g.dtype for g in gradients}) == 1
    if same and sum(sizes) <= _SMALL:
        flat = [g if g.shape.rank == 1 else tf.reshape(g, [-1]) for g in gradients]
        flat = flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)
        flat = tf.cast(flat, tf.float32) if flat.dtype.size < 4 else flat
        return tf.sqrt(2.0 * tf.nn.l2_loss(flat))
    if not same or gradients[0].dtype.size < 4:
        gradients = [tf.cast(g, tf.float32) for g in gradients]
    return tf.linalg.global_norm(gradients)


def scale_learning_rate(learning_rate: float, num_replicas: int, scaling: str = "none") -> float:
    """The learning rate for `num_replicas` replicas: "none" as it is, "linear" times n, "sqrt" times √n.

    For models that grow their batch with the replicas. Linear scaling: Goyal et al. 2017,
    arXiv:1706.02677; square root: Krizhevsky 2014, arXiv:1404.5997.
    """
    factors = {"none": 1.0, "linear": float(num_replicas), "sqrt": float(num_replicas) ** 0.5}
    if scaling not in factors:
        raise UsageError(f"lr_scaling is {scaling!r}; expected one of {', '.join(sorted(factors))}.")
    return learning_rate * factors[scaling]
