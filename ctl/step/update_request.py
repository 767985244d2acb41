"""Requests to apply the gradients of one replica to variables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.errors import UsageError
from ctl.step import finiteness, optimizers
from ctl.step.context import StepContext
from ctl.step.reducers.sparse_rows import NO_ROW, has_unique_rows


@dataclass(frozen=True)
class UpdateRequest:
    """Gradients of one replica that an optimizer will apply after their reduction.

    Attributes:
      gradients: Gradients of this replica, tensors or `tf.IndexedSlices`.
      variables: Variables of the gradients, in the same order.
      loss_flag: `[]` float32, 1 where the loss of this replica is not finite, else 0.
      optimizer: Optimizer that applies the reduced gradients.
      condition: `[]` bool, equal on all replicas: True where this step applies the update. None: always.
      label: Name of the optimizer in reports. An empty string for `self.optimizer`.
      may_lack_rows: True if sparse gradients may have rows with the index NO_ROW.
      has_unique_rows: For each gradient, True if its row indices are unique on this replica.
    """

    gradients: Sequence[Any]
    variables: Sequence[Any]
    loss_flag: Any
    optimizer: Any
    condition: Any = None
    label: str = ""
    may_lack_rows: bool = False
    has_unique_rows: Sequence[bool] = ()


def compute_update(
    loss: Any, tape: tf.GradientTape, variables: Sequence[Any], optimizer: Any, context: StepContext
) -> UpdateRequest:
    """Computes gradients, multiplied by the loss scale of the optimizer.

    Args:
      loss: `[]`, share of this replica in the global loss, computed inside `tape`.
      tape: Tape of the forward pass.
      variables: Variables to train. Variables without a gradient are left out.
      optimizer: Optimizer that will apply the gradients.
      context: Context of the step. If workers train independently, the gradients are those of the mean over
        the worker's own examples.

    Returns:
      The request, not yet reduced over replicas.

    Raises:
      UsageError: If no variable has a gradient, or the loss is not a scalar.
    """
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank != 0:
        raise UsageError(
            f"minimize() got a loss of shape {loss.shape}; expected a scalar. Write "
            "loss = self.average(per_example) inside the tape."
        )
    variables = list(variables)
    scale = optimizers.scale_of(optimizer)
    if context.num_local_workers:
        scale = context.num_local_workers * (1.0 if scale is None else scale)
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
    return create_update(pairs, optimizer, finiteness.flag_of(loss), context)


def create_update(
    pairs: Sequence[tuple[Any, Any]], optimizer: Any, loss_flag: Any, context: StepContext
) -> UpdateRequest:
    """Creates the request for pairs (gradient, variable) of this replica.

    Where the replica has no example, dense gradients are zeros and rows of sparse ones have the index
    NO_ROW.
    """
    gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
    unique = [has_unique_rows(g) for g in gradients]
    if context.is_empty is not None:
        values = [*gradients, loss_flag]
        values = tf.cond(context.is_empty, lambda: [_zeros(value) for value in values], lambda: values)
        *gradients, loss_flag = values
    return UpdateRequest(
        gradients,
        variables,
        loss_flag,
        optimizer,
        may_lack_rows=context.is_empty is not None,
        has_unique_rows=unique,
    )


def _zeros(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        no_rows = tf.fill(tf.shape(gradient.indices), tf.cast(NO_ROW, gradient.indices.dtype))
        return tf.IndexedSlices(tf.zeros_like(gradient.values), no_rows, gradient.dense_shape)
    return tf.zeros_like(gradient)
