"""Horovod's API without Horovod: `import ctl.hvd as hvd` instead of `horovod.tensorflow`.

Each process is one rank. Start the ranks with `ctlrun -np 2 python train.py`. See docs/horovod.md.
"""

from typing import Any

from ctl.hvd.advice import check_sharding, checkpoint_dir, scale_learning_rate, scale_steps, shard
from ctl.hvd.arguments import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    check_num_rank_power_of_2,
    handle_average_backwards_compatibility,
)
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
    sycl_built,
)
from ctl.hvd.compression import Compression
from ctl.hvd.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    RefusedError,
)
from ctl.hvd.hooks import BroadcastGlobalVariablesHook, broadcast_global_variables
from ctl.hvd.objects import allgather_object, broadcast_object, broadcast_object_fn
from ctl.hvd.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from ctl.hvd.optimizers import DistributedDeltaAdasumOptimizer, DistributedOptimizer
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
from ctl.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from ctl.hvd.run_time import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from ctl.hvd.tapes import DistributedGradientTape, PartialDistributedGradientTape
from ctl.hvd.variables import broadcast_, broadcast_variables

__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression",
    "DistributedDeltaAdasumOptimizer", "DistributedGradientTape", "DistributedOptimizer",
    "HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt", "Max",
    "Min", "PartialDistributedGradientTape", "ProcessSet", "Product", "RefusedError", "Sum",
    "SyncBatchNormalization", "add_process_set", "allgather", "allgather_object", "allreduce",
    "alltoall", "barrier", "broadcast", "broadcast_", "broadcast_global_variables",
    "broadcast_object", "broadcast_object_fn", "broadcast_variables", "ccl_built",
    "check_num_rank_power_of_2", "check_sharding", "checkpoint_dir", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "elastic", "get_process_set_ids_and_ranks", "global_process_set",
    "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "handle_average_backwards_compatibility", "init", "is_homogeneous",
    "is_initialized", "join", "keras", "local_rank", "local_rank_op", "local_size",
    "local_size_op", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "process_set_included_op", "rank", "rank_op", "reducescatter", "remove_process_set",
    "rocm_built", "run", "scale_learning_rate", "scale_steps", "shard", "shutdown", "size",
    "size_op", "start_timeline", "stop_timeline", "sycl_built", "util",
]  # fmt: skip

_LAZY_MODULE_BY_NAME = {
    "SyncBatchNormalization": "sync_batch_norm",  # imports Keras
    "_executing_eagerly": "util",
    "_has_eager": "util",
}


def __getattr__(name: str) -> Any:
    """Imports an attribute on its first use, because most scripts do not need it."""
    from importlib import import_module

    if name == "run":
        return import_module("ctl.launch.run_function").run
    if name == "mpi_ops":  # Horovod defines these names in this module
        return import_module(__name__)
    if name in _LAZY_MODULE_BY_NAME:
        return getattr(import_module(f"ctl.hvd.{_LAZY_MODULE_BY_NAME[name]}"), name)
    if name in ("elastic", "keras", "util"):
        return import_module(f"ctl.hvd.{name}")
    raise AttributeError(f"ctl.hvd has no {name!r}; see the names in ctl.hvd.__all__.")


def __dir__() -> list[str]:
    return list(__all__)
