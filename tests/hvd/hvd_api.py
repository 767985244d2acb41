"""Horovod's names and parameters, and what became of each: checked by a test, printed on a page."""

import importlib
import inspect
import textwrap

TF, KERAS, ELASTIC = "ctl.hvd", "ctl.hvd.keras", "ctl.hvd.elastic"
WORKS, DIFFERS, REFUSED = "works", "differs", "refused"
_SCALES = "prescale_factor postscale_factor"
_SETS = "process_set ignore_name_scope"
_OPTIMIZER = (
    "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op "
    "backward_passes_per_step average_aggregated_gradients num_groups groups process_set "
    "scale_local_gradients"
)
_DEVICES = "`device_dense`, `device_sparse` have no effect"
_JSON = "objects travel as JSON and array bytes; pickle only with `allow_pickle=True`"

# (module, name, Horovod's parameters, status, note for users)
ROWS = [
    (TF, "init", "comm process_sets", DIFFERS, "no `comm` of MPI; use process sets"),
    (TF, "shutdown", "", WORKS, "collectives that need this rank then fail at once"),
    (TF, "is_initialized", "", WORKS, ""),
    (TF, "size", "", WORKS, ""), (TF, "rank", "", WORKS, ""), (TF, "local_size", "", WORKS, ""),
    (TF, "local_rank", "", WORKS, ""), (TF, "cross_size", "", WORKS, ""),
    (TF, "cross_rank", "", WORKS, ""), (TF, "is_homogeneous", "", WORKS, ""),
    (TF, "rank_op", "name", WORKS, ""), (TF, "local_rank_op", "name", WORKS, ""),
    (TF, "size_op", "process_set_id name", WORKS, ""), (TF, "local_size_op", "name", WORKS, ""),
    (TF, "process_set_included_op", "process_set_id name", WORKS, ""),
    (TF, "start_timeline", "file_path mark_cycles", WORKS, "needs no HOROVOD_TIMELINE=DYNAMIC"),
    (TF, "stop_timeline", "", WORKS, ""),
    (TF, "mpi_built", "", WORKS, "True if mpi4py is installed"),
    (TF, "mpi_enabled", "", WORKS, "True in a job of `ctlrun --mpi`, or with CTL_COLLECTIVES=mpi"),
    (TF, "mpi_threads_supported", "", WORKS, "True after `init` over MPI"),
    (TF, "gloo_built", "", WORKS, "returns True"),
    (TF, "gloo_enabled", "", WORKS, "True unless collectives run over MPI"),
    (TF, "nccl_built", "", WORKS, "returns 1 where tensors of GPUs use NCCL"),
    (TF, "ddl_built", "", WORKS, "returns False"), (TF, "ccl_built", "", WORKS, "returns False"),
    (TF, "cuda_built", "", WORKS, "True if TensorFlow was built with it"),
    (TF, "rocm_built", "", WORKS, "True if TensorFlow was built with it"),
    (TF, "allreduce", f"tensor average device_dense device_sparse compression op {_SCALES} name {_SETS}",
     WORKS, _DEVICES),
    (TF, "grouped_allreduce",
     f"tensors average device_dense device_sparse compression op {_SCALES} {_SETS} name", WORKS, ""),
    (TF, "allgather", "tensor name ignore_name_scope process_set", WORKS, ""),
    (TF, "grouped_allgather", "tensors name ignore_name_scope process_set", WORKS, "types may differ"),
    (TF, "broadcast", "tensor root_rank name ignore_name_scope process_set", WORKS, ""),
    (TF, "broadcast_", "variables root_rank name process_set", WORKS, ""),
    (TF, "alltoall", "tensor splits name ignore_name_scope process_set", WORKS, ""),
    (TF, "reducescatter",
     f"tensor device_dense compression op name {_SETS} {_SCALES}", WORKS, ""),
    (TF, "grouped_reducescatter",
     f"tensors device_dense compression op process_set {_SCALES}", WORKS, ""),
    (TF, "barrier", "process_set", WORKS, "in a session, an operation"),
    (TF, "join", "", REFUSED, "agree on the number of steps with a Min all-reduce"),
    (TF, "broadcast_variables", "variables root_rank process_set inplace", WORKS, ""),
    (TF, "broadcast_global_variables", "root_rank", WORKS, "TF1; RuntimeError when eager"),
    (TF, "broadcast_object", "obj root_rank session name process_set", DIFFERS, _JSON),
    (TF, "broadcast_object_fn", "root_rank session name process_set", DIFFERS, _JSON),
    (TF, "allgather_object", "obj session name process_set", DIFFERS, _JSON),
    (TF, "ProcessSet", "ranks_or_comm", DIFFERS, "ranks only, no MPI communicator"),
    (TF, "add_process_set", "process_set", WORKS, ""),
    (TF, "remove_process_set", "process_set", WORKS, ""),
    (TF, "DistributedOptimizer", f"use_locking {_OPTIMIZER}", WORKS, "Keras 3, tf_keras, tf.compat.v1"),
    (TF, "DistributedGradientTape",
     "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor "
     "num_groups groups process_set scale_local_gradients", WORKS, ""),
    (TF, "PartialDistributedGradientTape",
     "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor "
     "num_groups groups process_set local_layers scale_local_gradients", WORKS, ""),
    (TF, "DistributedDeltaAdasumOptimizer", "optimizer", REFUSED, "no Adasum"),
    (TF, "SyncBatchNormalization", "fused", DIFFERS, "a Keras 3 layer; weighs ranks by their examples"),
    (TF, "BroadcastGlobalVariablesHook", "root_rank device", WORKS, ""),
    (TF, "run", "func args kwargs num_proc executable np", DIFFERS,
     "this machine only; functions that cannot be imported need `pip install cloudpickle`"),
    (KERAS, "DistributedOptimizer", _OPTIMIZER, WORKS, ""),
    (KERAS, "PartialDistributedOptimizer",
     "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor "
     "op groups process_set local_layers scale_local_gradients", WORKS, ""),
    (KERAS, "allreduce", f"value name average {_SCALES} op compression", WORKS, ""),
    (KERAS, "allgather", "value name", WORKS, ""), (KERAS, "broadcast", "value root_rank name", WORKS, ""),
    (KERAS, "reducescatter", "value name op", WORKS, ""),
    (KERAS, "broadcast_global_variables", "root_rank", WORKS, ""),
    (KERAS, "load_model", "filepath custom_optimizers custom_objects compression", WORKS, ""),
    (KERAS, "callbacks.BroadcastGlobalVariablesCallback", "root_rank device local_variables", WORKS, ""),
    (KERAS, "callbacks.MetricAverageCallback", "device", WORKS, ""),
    (KERAS, "callbacks.LearningRateScheduleCallback",
     "initial_lr multiplier start_epoch end_epoch staircase momentum_correction steps_per_epoch",
     WORKS, ""),
    (KERAS, "callbacks.LearningRateWarmupCallback",
     "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose", WORKS, ""),
    (KERAS, "callbacks.BestModelCheckpoint", "monitor verbose save_weights_only mode save_freq", WORKS, ""),
    (KERAS, "elastic.KerasState", "model optimizer", WORKS, ""),
    (KERAS, "elastic.CommitStateCallback", "state batches_per_commit", WORKS, ""),
    (KERAS, "elastic.UpdateBatchStateCallback", "state", WORKS, ""),
    (KERAS, "elastic.UpdateEpochStateCallback", "state", WORKS, ""),
    (KERAS, "elastic.run", "func", WORKS, ""),
    (ELASTIC, "run", "func", WORKS, ""),
    (ELASTIC, "TensorFlowState", "variables session", WORKS, ""),
    (ELASTIC, "TensorFlowKerasState", "model optimizer backend", WORKS, ""),
    (ELASTIC, "ObjectState", "", WORKS, "the objects as named arguments"),
]  # fmt: skip
CONSTANTS = ["Average", "Sum", "Min", "Max", "Product", "Compression", "global_process_set",
             "HorovodInternalError", "HostsUpdatedInterrupt", "elastic", "keras"]  # fmt: skip


def resolve(module, name):
    """Returns the object of a dotted name in a module."""
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def missing_parameters(module, name, parameters):
    """Returns the parameters of Horovod that are missing in ctl.hvd."""
    accepted = inspect.signature(resolve(module, name)).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        return [p for p in parameters.split() if p not in accepted and p not in _any_keyword(module, name)]
    return [p for p in parameters.split() if p not in accepted]


def _any_keyword(module, name):
    source = inspect.getsource(resolve(module, name))
    return {name.strip("\"'") for name in source.replace("(", " ").replace(",", " ").split()}


def table():
    """Returns the rows with a note as a Markdown list. All other names behave as in Horovod."""
    notes = {}
    for module, name, _, status, note in ROWS:
        text = note if status == WORKS else f"{status}: {note}"
        notes.setdefault(text, []).append(f"`{module.removeprefix('ctl.')}.{name}`")
    del notes[""]
    items = [f"- {', '.join(names)}: {text}" for text, names in notes.items()]
    wrapped = [textwrap.fill(t, 118, subsequent_indent="  ", break_on_hyphens=False) for t in items]
    return "\n".join(wrapped)
