"""Uniform access to optimizers of Keras 3, tf_keras and users: build, loss scale, application.

Gradients are summed over replicas before they are applied, so each kind of optimizer is prevented from
summing a second time. An optimizer that scales the loss (for float16) skips and rescales on every replica
in the same way, because every replica applies the same sum.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ctl.distribute.keras_objects import is_keras3
from ctl.errors import UsageError
from ctl.setting_values import check_choice, check_integer, check_type
from ctl.tensorflow_patches import optimizer_attributes, optimizer_sum

WITHOUT_SUM = "without_sum"  # attribute of an `apply` that sums: the `apply` of the optimizer's class


def scale_of(optimizer: Any) -> Any:
    """Returns the loss scale `[]` float32 of an optimizer, or None."""
    if not scales_loss(optimizer):
        return None
    if is_keras3(optimizer):
        return tf.cast(optimizer.scale_loss(tf.constant(1.0)), tf.float32)
    return tf.cast(optimizer.loss_scale, tf.float32)


def skips_what_is_not_finite(optimizer: Any) -> bool:
    """Returns True for an optimizer that skips steps with infinite gradients and lowers its loss scale."""
    return type(optimizer).__name__.startswith("LossScaleOptimizer")


def scales_loss(optimizer: Any) -> bool:
    """Returns True for an optimizer that multiplies the loss by a factor."""
    factor = is_keras3(optimizer) and getattr(optimizer, "loss_scale_factor", None) is not None
    return skips_what_is_not_finite(optimizer) or factor


def apply_without_sum(optimizer: Any, gradients: list, variables: Sequence[Any]) -> None:
    """Applies gradients that are summed over replicas and multiplied by the loss scale."""
    if is_keras3(optimizer):
        with optimizer_sum.summed_already(optimizer) as overwrite_steps:
            apply = getattr(optimizer.apply, WITHOUT_SUM, optimizer.apply)
            apply(gradients, list(variables))
        if overwrite_steps:
            _overwrite_by_average(
                getattr(optimizer, "inner_optimizer", optimizer), variables, overwrite_steps
            )
        return
    call = getattr(optimizer, "apply_gradients", None)
    if call is None:
        optimizer.apply(gradients, list(variables))
        return
    if skips_what_is_not_finite(optimizer):
        gradients = optimizer.get_unscaled_gradients(gradients)
    accepted = inspect.signature(call).parameters
    pairs = list(zip(gradients, variables, strict=True))
    if "skip_gradients_aggregation" in accepted or "kwargs" in accepted:
        call(pairs, skip_gradients_aggregation=True)
    elif "experimental_aggregate_gradients" in accepted:
        call(pairs, experimental_aggregate_gradients=False)
    else:
        call(pairs)


def _overwrite_by_average(optimizer: Any, variables: Sequence[Any], steps: int) -> None:
    """Assigns the moving averages of a Keras 3 optimizer to the variables every `steps` updates."""
    averages = optimizer_attributes.keras3_averages(optimizer, variables)
    is_due = tf.equal(tf.cast(optimizer.iterations.value, tf.int64) % steps, 0)

    def assign(variable: Any, average: Any, is_due: Any) -> None:
        variable.assign(tf.where(is_due, tf.cast(average, variable.dtype), variable))

    def update_each(strategy: Any, is_due: Any) -> None:
        for variable, average in zip(variables, averages, strict=True):
            strategy.extended.update(variable.value, assign, args=(average.value, is_due), group=True)

    tf.__internal__.distribute.interim.maybe_merge_call(update_each, tf.distribute.get_strategy(), is_due)


def check_optimizer(optimizer: Any, name: str = "optimizer", num_replicas: int = 1) -> None:
    """Raises UsageError for an object that is no optimizer, or has settings unsupported on replicas."""
    if num_replicas > 1 and getattr(optimizer, "gradient_accumulation_steps", None):
        raise UsageError(
            f"self.{name} accumulates gradients itself, which Keras cannot do on {num_replicas} "
            "replicas. Write self.gradients = ctl.Gradients(accumulate_steps=...) in build() instead."
        )
    overwrites = getattr(optimizer, "ema_overwrite_frequency", None) and not is_keras3(optimizer)
    if num_replicas > 1 and overwrites:
        raise UsageError(
            f"self.{name} has ema_overwrite_frequency={optimizer.ema_overwrite_frequency}, which "
            f"Keras cannot do on {num_replicas} replicas. Leave it out, and call "
            "self.optimizer.finalize_variable_values(...) when training is over."
        )
    if isinstance(optimizer, str):
        raise UsageError(
            f"self.{name} is the string {optimizer!r}; expected an optimizer, e.g. "
            f"keras.optimizers.get({optimizer!r})."
        )
    if not (hasattr(optimizer, "apply_gradients") or hasattr(optimizer, "apply")):
        raise UsageError(
            f"self.{name} is a {type(optimizer).__name__}; expected a Keras optimizer or an object "
            "with apply_gradients(grads_and_vars) or apply(gradients, variables)."
        )


def build_slots(optimizer: Any, variables: Sequence) -> None:
    """Creates the variables of an optimizer. Called inside the scope of the strategy, before tracing."""
    build = getattr(optimizer, "build", None)
    if callable(build) and not getattr(optimizer, "built", False):
        build(list(variables))
    elif optimizer_attributes.is_legacy(optimizer):
        optimizer_attributes.build_legacy(optimizer, list(variables))


def scale_learning_rate(learning_rate: float, num_replicas: int, scaling: str = "none") -> float:
    """Returns the learning rate for `num_replicas` replicas: "none" * 1, "linear" * n, "sqrt" * √n.

    For models that increase their batch with the replicas. Linear scaling: Goyal et al. 2017,
    arXiv:1706.02677; square root: Krizhevsky 2014, arXiv:1404.5997.

    Args:
      learning_rate: Learning rate of one replica.
      num_replicas: Number of replicas of all workers.
      scaling: "none", "linear" or "sqrt".

    Raises:
      UsageError: An argument is invalid.
    """
    check_type("learning_rate", learning_rate, float)
    check_integer("num_replicas", num_replicas, 1)
    factors = {"none": 1.0, "linear": float(num_replicas), "sqrt": float(num_replicas) ** 0.5}
    check_choice("lr_scaling", scaling, tuple(factors))
    return learning_rate * factors[scaling]
