"""Application of an update: reduce, check, clip, apply.

Keras 3 clips the gradients of each replica before their sum and sums in the optimizer. Here the reducer has
summed the gradients, so clipping and the check see the global gradients, and the optimizer does not sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.step import finiteness, optimizers
from ctl.step.context import StepContext
from ctl.step.record import UpdateOutcome
from ctl.step.reducers.reducer import GradientReducer, ReducedGradients
from ctl.step.reducers.sparse_rows import merged
from ctl.step.update_request import UpdateRequest

_SMALL = 100_000  # elements; below, one concatenation is cheaper than a norm per variable
_MIN_LOSS_SCALE = 2.0**-14  # an overflow at this scale has another cause than the scale


def apply_update(request: UpdateRequest, context: StepContext, reducer: GradientReducer) -> UpdateOutcome:
    """Reduces the gradients of a request, checks them, clips them and applies them. Replica context.

    If the loss or a gradient is not finite on any replica, `on_nonfinite` of the settings applies to all
    replicas. With "stop" the graph raises InvalidArgumentError with `finiteness.MESSAGE`, except
    where it cannot; then `may_continue` of the outcome is False.

    Returns:
      The outcome. Its norm is a pair (sum, count) under loss scaling or with a condition: (0, 0) for a step
      that changes no variable. Under loss scaling such a step lowers the scale on every replica.
    """
    reduced = reducer.reduce(request, context)
    gradients = list(reduced.gradients)
    merged_rows = [merged(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    gradients = merged_rows if context.settings.merge_rows else gradients
    norm, scale = _global_norm(merged_rows), optimizers.scale_of(request.optimizer)
    suspects = reduced.suspects
    if suspects is None:
        suspects = finiteness.suspects_of_only_replica(request.loss_flag, norm)
    elif callable(suspects):
        suspects = suspects(norm)
    if scale is not None:
        norm /= tf.cast(scale, norm.dtype)
    is_scaled = optimizers.skips_what_is_not_finite(request.optimizer)
    check = _check(request, context, reducer, norm, suspects, scale if is_scaled else None)
    if context.settings.clip_norm is not None:
        gradients = _clipped(gradients, norm, context.settings.clip_norm, is_scaled)
    with tf.control_dependencies(check.dependencies), context.exclusive_updates():
        _apply(request, gradients, check.condition)
        _assign(reduced, check.condition)
    with tf.control_dependencies(check.dependencies):  # a step that ends the run is not counted
        norm = tf.identity(norm)
    if is_scaled or check.condition is not None:
        counts = tf.math.is_finite(norm) if is_scaled else tf.constant(True)
        counts &= True if check.condition is None else check.condition
        norm = tf.where(counts, norm, tf.zeros_like(norm)), tf.cast(counts, tf.float64)
    return UpdateOutcome(norm, suspects, check.is_valid, check.may_continue)


@dataclass(frozen=True)
class _Check:
    """Consequences of the check for finite values.

    Attributes:
      condition: `[]` bool, True where the update is applied. None: always.
      dependencies: Operations that raise an error before the update.
      is_valid, may_continue: See `UpdateOutcome`.
    """

    condition: Any
    dependencies: Sequence[tf.Operation] = ()
    is_valid: Any = None
    may_continue: Any = None


def _check(
    request: UpdateRequest,
    context: StepContext,
    reducer: GradientReducer,
    norm: Any,
    suspects: Any,
    loss_scale: Any,
) -> _Check:
    """Creates the check. `loss_scale` is that of an optimizer that skips such updates itself, else None."""
    condition, policy = request.condition, context.settings.on_nonfinite
    if loss_scale is not None:
        is_fine = (loss_scale >= _MIN_LOSS_SCALE) | tf.math.is_finite(norm)
        if not context.is_in_compiled_loop:
            return _Check(condition, [finiteness.stop_unless(is_fine, suspects)])
        return _Check(_both(condition, is_fine), may_continue=is_fine)
    is_finite = finiteness.is_finite(norm, suspects)
    if policy != "stop":
        return _Check(_both(condition, is_finite), is_valid=is_finite)
    if reducer.num_local_workers:
        return _Check(condition, may_continue=is_finite)
    if context.is_in_compiled_loop:
        return _Check(_both(condition, is_finite), may_continue=is_finite)
    return _Check(condition, [finiteness.stop_unless(is_finite, suspects)])


def _both(condition: Any, other: Any) -> Any:
    return other if condition is None else condition & other


def _clipped(gradients: list, norm: Any, clip_norm: float, is_scaled: bool) -> list:
    limit = tf.cast(clip_norm, norm.dtype)
    factor = limit / tf.maximum(norm, limit)
    if is_scaled:  # of an infinite norm it would be 0, and the step would count as a finite one
        factor = tf.where(tf.math.is_finite(norm), factor, float("nan"))
    return [_scaled(g, tf.cast(factor, g.dtype)) for g in gradients]


def _apply(request: UpdateRequest, gradients: list, condition: Any) -> None:
    def apply(*parts: Any) -> Any:
        optimizers.apply_without_sum(request.optimizer, list(parts), request.variables)
        return tf.constant(0)

    if condition is None:
        optimizers.apply_without_sum(request.optimizer, gradients, request.variables)
        return
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(condition, lambda: apply(*gradients), lambda: tf.constant(0))
        return

    def across_replicas(strategy: Any, condition: Any, *parts: Any) -> None:  # MirroredStrategy
        def apply_on_each() -> Any:
            strategy.extended.call_for_each_replica(apply, args=parts)
            return tf.constant(0)

        local = strategy.experimental_local_results(condition)[0]
        tf.cond(local, apply_on_each, lambda: tf.constant(0))

    tf.distribute.get_replica_context().merge_call(across_replicas, args=(condition, *gradients))


def _assign(reduced: ReducedGradients, condition: Any) -> None:
    for variable, value in reduced.assignments:
        variable.assign(value if condition is None else tf.where(condition, value, variable))


def _scaled(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _static_size(gradient: Any) -> float:
    """Returns the number of elements of a dense gradient; infinity if it is sparse or of unknown size."""
    if isinstance(gradient, tf.IndexedSlices):
        return float("inf")
    size = gradient.shape.num_elements()
    return float("inf") if size is None else size


def _global_norm(gradients: list) -> tf.Tensor:
    sizes = [_static_size(g) for g in gradients]
    has_one_dtype = len({g.dtype for g in gradients}) == 1
    if has_one_dtype and sum(sizes) <= _SMALL:
        flat = [g if g.shape.rank == 1 else tf.reshape(g, [-1]) for g in gradients]
        flat = flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)
        flat = tf.cast(flat, tf.float32) if flat.dtype.size < 4 else flat
        return tf.sqrt(2.0 * tf.nn.l2_loss(flat))
    if not has_one_dtype or gradients[0].dtype.size < 4:
        gradients = [tf.cast(g, tf.float32) for g in gradients]
    return tf.linalg.global_norm(gradients)
