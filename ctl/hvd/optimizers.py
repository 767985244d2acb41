"""Distributed optimizers, which apply the reduced gradients of all ranks: `hvd.DistributedOptimizer`.

optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
model.compile(optimizer, loss="mse")
"""

import warnings
from typing import Any

import tensorflow as tf
from ctl.distribute.keras_objects import is_keras3
from ctl.errors import UsageError
from ctl.hvd import arguments
from ctl.hvd.compression import Compression
from ctl.hvd.keras3_optimizers import Distributed, Keras3, add_loss_scale, distributed
from ctl.hvd.process_sets import ProcessSet, global_process_set
from ctl.hvd.reducing import Reduction
from ctl.hvd.tf1_optimizers import Tf1Optimizer
from ctl.hvd.tf_keras_optimizers import TfKeras
from ctl.setting_values import check_integer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = arguments.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns an optimizer that applies the reduced gradients of all ranks.

    Args:
      optimizer: Optimizer of Keras 3, tf_keras or tf.compat.v1.train. The result has its class, its
        state and its variables; do not use the original. Under the policy "mixed_float16" the result is
        a `LossScaleOptimizer`, as in `model.compile`; all ranks then skip the same steps.
      name: Part of the names of exchanges. Default: "Distributed" and the class.
      use_locking: Only for optimizers of tf.compat.v1.
      device_dense: Ignored.
      device_sparse: Ignored.
      compression: Compression of dense gradients that are sent through a network.
      sparse_as_dense: If True, converts tf.IndexedSlices to tensors before the exchange.
      backward_passes_per_step: Steps per exchange of their summed gradients. `iterations` counts each step.
      op: Average or Sum.
      gradient_predivide_factor: An average is divided by it before, and multiplied after, the sum.
      average_aggregated_gradients: If True, uses the mean of the passes instead of their sum.
      num_groups: Deprecated name of `groups`.
      groups: Number of exchanges, or lists of variables per exchange. Default: as few exchanges as
        HOROVOD_FUSION_THRESHOLD (bytes per exchange) allows.
      process_set: Ranks of the exchange. Other ranks apply their own gradients.
      scale_local_gradients: If True, divides gradients of `register_local_var` by the number of ranks.

    Raises UsageError for invalid arguments, and RefusedError if `op` is Adasum.
    """
    _check(optimizer, backward_passes_per_step, op)
    reduction = Reduction(
        name=name or f"Distributed{type(optimizer).__name__}",
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        groups=select_groups(num_groups, groups),
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scales_local=scale_local_gradients,
    )
    options = reduction, backward_passes_per_step, average_aggregated_gradients
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return Tf1Optimizer(optimizer, reduction.name, use_locking, options)
    if is_keras3(optimizer):
        return distributed(add_loss_scale(optimizer), Keras3, options)
    return distributed(optimizer, TfKeras, options)


def DistributedDeltaAdasumOptimizer(*args: Any, **options: Any) -> Any:
    """Raises RefusedError, as does op=Adasum."""
    return Reduction("DistributedDelta", op=arguments.Adasum)


def layer_variables(local_layers: Any) -> list[Any]:
    """Returns the trainable weights of one layer or several layers; none for None."""
    if local_layers is None:
        return []
    layers = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    wrong = [layer for layer in layers if not hasattr(layer, "trainable_weights")]
    if wrong:
        raise UsageError(f"local_layers contains {wrong[0]!r}; expected Keras layers.")
    return [variable for layer in layers for variable in layer.trainable_weights]


def select_groups(num_groups: int, groups: Any) -> Any:
    """Returns `groups`, or the deprecated `num_groups` with a warning."""
    if num_groups == 0:
        return groups
    warnings.warn("num_groups is deprecated; use groups.", DeprecationWarning, stacklevel=3)
    return num_groups if groups is None else groups


def _check(optimizer: Any, passes: int, op: int) -> None:
    if isinstance(optimizer, (Distributed, Tf1Optimizer)):
        raise UsageError(
            "DistributedOptimizer got a distributed optimizer, whose gradients would be exchanged "
            "twice; expected the optimizer that it wraps."
        )
    if not hasattr(optimizer, "apply_gradients"):
        raise UsageError(
            f"DistributedOptimizer got {type(optimizer).__name__}; expected an optimizer of Keras 3, "
            "tf_keras or tf.compat.v1.train, for example keras.optimizers.get(name)."
        )
    check_integer("backward_passes_per_step", passes, 1)
    if op not in (arguments.Average, arguments.Sum, arguments.Adasum):
        raise UsageError(f"op is {op}; expected hvd.Average or hvd.Sum for an optimizer.")
