"""The gradient path: sum over replicas once, check, clip, apply once.

`ctl` owns the sum over replicas. Keras 3 clips each replica's part *before* its sum, and its
accumulation does not run in a distributed step; here clipping sees the global gradient, the finite
check needs no extra communication (the sum of anything not finite is not finite, on every replica
alike), and the optimizer is kept from summing a second time.
"""

import contextlib
import inspect
import numbers
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl import update_lock
from ctl.errors import UsageError

NON_FINITE_MESSAGE = "gradient norm is not finite"
_SMALL = 100_000  # elements; below, one concatenation is cheaper than a norm per variable
_WIRE_DTYPES = (None, "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """How gradients become an update. Set `self.gradients` in `build`.

    Attributes:
      clip_norm: largest global norm of the summed gradient; larger ones are scaled down. None: off.
      accumulate_steps: parts into which a replica's batch is split; their gradients are added up
        before the one update, so a large batch fits into little memory.
      wire_dtype: "bfloat16" or "float16" halves what travels between replicas; None sends as is.
    """

    clip_norm: float | None = None
    accumulate_steps: int = 1
    wire_dtype: str | None = None

    def __post_init__(self):
        number = isinstance(self.clip_norm, numbers.Real)
        if self.clip_norm is not None and not (number and self.clip_norm > 0):
            raise UsageError(f"clip_norm is {self.clip_norm!r}; expected a number > 0, or None.")
        n = self.accumulate_steps
        if isinstance(n, bool) or not isinstance(n, numbers.Integral) or int(n) < 1:
            raise UsageError(f"accumulate_steps is {n!r}; expected a whole number >= 1.")
        if self.wire_dtype not in _WIRE_DTYPES:
            raise UsageError(
                f"wire_dtype is {self.wire_dtype!r}; expected 'bfloat16', 'float16' or None."
            )


@dataclass
class Update:
    """One call of `minimize`: gradients that wait to be applied to variables by an optimizer."""

    gradients: list
    variables: list
    optimizer: Any


def compute(loss, tape: tf.GradientTape, variables: Sequence, optimizer) -> Update:
    """This replica's gradients; variables without one are left out.

    Raises UsageError if no variable has a gradient, or the loss is not a scalar.
    """
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank != 0:
        raise UsageError(
            f"minimize() got a loss of shape {loss.shape}; expected a scalar. Write "
            "loss = self.average(per_example) inside the tape."
        )
    variables = list(variables)
    gradients = tape.gradient(loss, variables)
    pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
    if not pairs:
        raise UsageError(
            f"minimize() found no gradient for any of {len(variables)} variables; expected the "
            "loss to depend on them. Compute the loss inside `with tf.GradientTape() as tape:`."
        )
    return Update([g for g, _ in pairs], [v for _, v in pairs], optimizer)


def apply(update: Update, how: Gradients) -> tf.Tensor:
    """Sums over replicas, checks, clips and applies; returns the global norm `[]` before clipping.

    Called in replica context. A gradient that is not finite raises InvalidArgumentError with
    NON_FINITE_MESSAGE when the graph runs, on every replica at the same step, before the update.
    """
    gradients = [_added_up(g) for g in update.gradients]
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync > 1:
        gradients = _all_reduce(context, gradients, how.wire_dtype)
    norm = tf.debugging.check_numerics(_global_norm(gradients), NON_FINITE_MESSAGE)
    if how.clip_norm is not None:
        limit = tf.cast(how.clip_norm, norm.dtype)
        scale = limit / tf.maximum(norm, limit)
        gradients = [_scaled(g, tf.cast(scale, g.dtype)) for g in gradients]
    with tf.control_dependencies([norm]), update_lock.held():
        _apply_without_sum(update.optimizer, gradients, update.variables)
    return norm


def _all_reduce(context, gradients: list, wire_dtype: str | None) -> list:
    """Sum over replicas in one collective per dtype; sparse gradients stay sparse."""
    reduced: list = [None] * len(gradients)
    dense: dict[tf.DType, list[int]] = {}
    for i, g in enumerate(gradients):
        if isinstance(g, tf.IndexedSlices):
            reduced[i] = _added_up(context.all_reduce(tf.distribute.ReduceOp.SUM, g))
        else:
            dense.setdefault(g.dtype, []).append(i)
    for dtype, places in dense.items():
        parts = [gradients[i] for i in places]
        flat = tf.concat([tf.reshape(g, [-1]) for g in parts], axis=0)
        wire = tf.as_dtype(wire_dtype) if wire_dtype and dtype.is_floating else dtype
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flat, wire))
        total = tf.cast(total, dtype)
        for i, piece in zip(places, tf.split(total, [_size(g) for g in parts]), strict=True):
            reduced[i] = tf.reshape(piece, tf.shape(gradients[i]))
    return reduced


def _scaled(gradient, factor):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _added_up(gradient):
    """A sparse gradient with every index once, so that its norm is that of the dense one."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _size(tensor: tf.Tensor):
    size = tensor.shape.num_elements()
    return tf.size(tensor) if size is None else size


def _static_size(gradient) -> float:
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


def _apply_without_sum(optimizer, gradients: list, variables: list) -> None:
    if is_keras3(optimizer):
        with _keras3_summed_already(optimizer):
            optimizer.apply(gradients, variables)
        return
    call = getattr(optimizer, "apply_gradients", None)
    if call is None:
        optimizer.apply(gradients, variables)
        return
    accepted = inspect.signature(call).parameters
    pairs = list(zip(gradients, variables, strict=True))
    if "skip_gradients_aggregation" in accepted or "kwargs" in accepted:
        call(pairs, skip_gradients_aggregation=True)
    elif "experimental_aggregate_gradients" in accepted:
        call(pairs, experimental_aggregate_gradients=False)
    else:
        call(pairs)


_patch_lock = threading.Lock()


@contextlib.contextmanager
def _keras3_summed_already(optimizer):
    """Keras 3 has no argument for gradients that were summed; its hook is set aside while tracing.

    The traces of several replicas interleave in threads, so entering and leaving may nest.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    with _patch_lock:
        object.__setattr__(inner, "_all_reduce_sum_gradients", list)
    try:
        yield
    finally:
        with _patch_lock:
            inner.__dict__.pop("_all_reduce_sum_gradients", None)


def is_keras3(thing) -> bool:
    """True for objects of Keras 3 (as opposed to tf_keras, tf.Module or a person's own classes)."""
    return any(
        c.__module__ == "keras" or c.__module__.startswith("keras.") for c in type(thing).__mro__
    )


def check_optimizer(optimizer, name: str = "optimizer", num_replicas: int = 1) -> None:
    """Raises UsageError for what cannot be an optimizer here, before anything is traced."""
    if type(optimizer).__name__ == "LossScaleOptimizer":
        raise UsageError(
            f"self.{name} is a LossScaleOptimizer; scaled losses are not supported yet. Train with "
            "the precision policy 'mixed_bfloat16', which needs no scaling, or float32."
        )
    if num_replicas > 1 and getattr(optimizer, "gradient_accumulation_steps", None):
        raise UsageError(
            f"self.{name} accumulates gradients itself, which Keras cannot do on {num_replicas} "
            "replicas. Write self.gradients = ctl.Gradients(accumulate_steps=...) in build() instead."
        )
    if num_replicas > 1 and getattr(optimizer, "ema_overwrite_frequency", None):
        raise UsageError(
            f"self.{name} has ema_overwrite_frequency={optimizer.ema_overwrite_frequency}, which "
            f"Keras cannot do on {num_replicas} replicas. Leave it out, and call "
            "self.optimizer.finalize_variable_values(...) when training is over."
        )
    if isinstance(optimizer, str):
        raise UsageError(
            f"self.{name} is the word {optimizer!r}; expected an optimizer, e.g. "
            f"keras.optimizers.get({optimizer!r})."
        )
    if not (hasattr(optimizer, "apply_gradients") or hasattr(optimizer, "apply")):
        raise UsageError(
            f"self.{name} is a {type(optimizer).__name__}; expected a Keras optimizer or an object "
            "with apply_gradients(grads_and_vars) or apply(gradients, variables)."
        )


def build_slots(optimizer, variables: Sequence) -> None:
    """Creates the optimizer's variables now; called inside the strategy's scope, before tracing."""
    build = getattr(optimizer, "build", None)
    if callable(build) and not getattr(optimizer, "built", False):
        build(list(variables))
    elif hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        optimizer._create_all_weights(list(variables))


def scale_learning_rate(learning_rate: float, num_replicas: int, scaling: str = "none") -> float:
    """The learning rate for `num_replicas` replicas: "none" as it is, "linear" times n, "sqrt" times √n.

    For models that grow their batch with the replicas. Linear scaling: Goyal et al. 2017,
    arXiv:1706.02677; square root: Krizhevsky 2014, arXiv:1404.5997.
    """
    factors = {"none": 1.0, "linear": float(num_replicas), "sqrt": float(num_replicas) ** 0.5}
    if scaling not in factors:
        raise UsageError(
            f"lr_scaling is {scaling!r}; expected one of {', '.join(sorted(factors))}."
        )
    return learning_rate * factors[scaling]
