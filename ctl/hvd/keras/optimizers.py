"""Factories of distributed optimizers with the order of arguments of `horovod.keras`."""

from typing import Any

from ctl.hvd import arguments
from ctl.hvd import optimizers as optimizers_lib
from ctl.hvd.compression import Compression
from ctl.hvd.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = arguments.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a distributed optimizer. See `ctl.hvd.DistributedOptimizer`."""
    return optimizers_lib.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = arguments.Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a `DistributedOptimizer` that does not exchange the gradients of `local_layers`.

    `local_layers` are one layer or several layers that only this rank has. If `scale_local_gradients`,
    their gradients are divided by the number of ranks.
    """
    local_variables = optimizers_lib.layer_variables(local_layers)
    distributed_optimizer = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local_variables:
        distributed_optimizer.register_local_var(variable)
    return distributed_optimizer
