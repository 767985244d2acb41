"""Horovod's API for Keras: `import ctl.hvd.keras as hvd`.

It supports models of Keras 3 and of tf_keras. Keras 3 does not support two features of old scripts: the
argument `model.compile(..., experimental_run_tf_function=False)`, and `optimizer.lr`, which is now
`optimizer.learning_rate`. The attribute `variables` of a `DistributedOptimizer` may also be called, as in
older versions.
"""

from typing import Any

from ctl.hvd.arguments import Adasum, Average, Max, Min, Product, Sum
from ctl.hvd.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ctl.hvd.compression import Compression
from ctl.hvd.keras import callbacks
from ctl.hvd.keras.loading import load_model
from ctl.hvd.keras.optimizers import DistributedOptimizer, PartialDistributedOptimizer
from ctl.hvd.keras.values import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter
from ctl.hvd.objects import allgather_object, broadcast_object
from ctl.hvd.ops import barrier, join
from ctl.hvd.process import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ctl.hvd.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ctl.hvd.variables import broadcast_variables

__all__ = ["Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min",
           "PartialDistributedOptimizer", "ProcessSet", "Product", "Sum", "add_process_set",
           "allgather", "allgather_object", "allreduce", "barrier", "broadcast",
           "broadcast_global_variables", "broadcast_object", "broadcast_variables", "callbacks",
           "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
           "gloo_built", "gloo_enabled", "init", "is_homogeneous", "is_initialized", "join",
           "load_model", "local_rank", "local_size", "mpi_built", "mpi_enabled",
           "mpi_threads_supported", "nccl_built", "rank", "reducescatter", "remove_process_set",
           "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports the module `elastic` on its first use."""
    if name == "elastic":
        import importlib

        return importlib.import_module("ctl.hvd.keras.elastic")
    raise AttributeError(f"ctl.hvd.keras has no {name!r}.")
