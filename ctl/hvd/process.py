"""Membership of this process in the group of ranks: initialization, shutdown, rank and size."""

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ctl.collectives import failures, graph_errors, settings
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError, PortInUseError
from ctl.collectives.ranks import Ranks
from ctl.collectives.settings import Settings
from ctl.distribute import mpi_cluster, own_port, rank_variables
from ctl.distribute.platforms import detection
from ctl.errors import UsageError
from ctl.hvd import process_sets as process_sets_lib
from ctl.io import exit_hook
from ctl.supervision import heartbeat
from ctl.tensorflow_patches import keras_compilation

_engine: Engine | None = None
_lock = threading.RLock()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the group of ranks. Blocks until all ranks have connected. Further calls are no-ops.

    Args:
      comm: None, or all ranks. Use a process set for a subset of the ranks.
      process_sets: Initial `ProcessSet`s, equal on all ranks, or "dynamic".

    Raises:
      UsageError: If the topology is invalid (TF_CONFIG, HOROVOD_*).
      HorovodInternalError: If some ranks do not connect within HOROVOD_START_TIMEOUT seconds.
    """
    global _engine  # noqa: PLW0603  one per process, as ranks are
    with _lock:
        if _engine is None:
            runtime_settings = settings.read_settings()
            new_engine = _create_engine(comm, runtime_settings)
            _disable_thread_spinning(new_engine.ranks.local_size)
            _join_plane(new_engine, runtime_settings)
            if runtime_settings.timeline and new_engine.ranks.rank == 0:
                new_engine.timeline.start(
                    runtime_settings.timeline, mark_cycles=runtime_settings.mark_cycles
                )
            _engine = new_engine
            process_sets_lib.register_global_set(new_engine)
            atexit.register(_leave_at_exit)
            exit_hook.install_exit_codes()
            _start_heartbeat()
            graph_errors.install_graph_errors()
            keras_compilation.install_compilation_check(has_peers)
        process_sets_lib.add_static_sets(process_sets)


def _join_plane(new_engine: Engine, runtime_settings: Settings) -> None:
    from ctl.hvd import elastic_line

    if not elastic_line.is_elastic():
        from ctl.collectives import tensorflow_plane

        tensorflow_plane.join_plane(new_engine, runtime_settings.plane)
        new_engine.agree_on_links()
    elif runtime_settings.plane == "tensorflow":
        raise UsageError(
            "CTL_COLLECTIVES is 'tensorflow' in an elastic job, but TensorFlow's collectives do not "
            "support a change of ranks. Unset CTL_COLLECTIVES, or start without --host-discovery-script."
        )


def _disable_thread_spinning(local_size: int) -> None:
    """Disables spinning of TensorFlow's idle threads if each rank has fewer than two cores.

    All ranks of the host are assumed to share the cores that this process may use. Has no effect after the
    first tensor, or in programs of TensorFlow 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if local_size == 1 or cores >= 2 * local_size:
        return
    from ctl.collectives.tensorflow_plane import is_tensorflow_initialized
    from ctl.tensorflow_patches import thread_spinning

    if not is_tensorflow_initialized():
        thread_spinning.disable_thread_spinning()


def _start_heartbeat() -> None:
    """Starts the heartbeats that the launcher uses to supervise this process."""
    heartbeat.current.start()
    if heartbeat.current.phase == heartbeat.STARTING:
        heartbeat.current.phase = heartbeat.TRAINING


def shutdown() -> None:
    """Leaves the group. A pending collective that needs this rank raises an error on the other ranks."""
    _leave(linger=False)


def _leave_at_exit() -> None:
    """Leaves the group. Rank 0 serves its peers for some seconds, unless it ends with an exception."""
    _leave(linger=getattr(sys, "last_value", None) is None)


def _leave(*, linger: bool) -> None:
    global _engine
    with _lock:
        if _engine is not None:
            atexit.unregister(_leave_at_exit)
            leaving_engine, _engine = _engine, None
            process_sets_lib.end_process_sets()
            leaving_engine.close(linger=linger)


def _create_engine(comm: Any, runtime_settings: Settings) -> Engine:
    """Creates the engine and blocks until all ranks have connected. Retries in an elastic job."""
    from ctl.hvd import elastic_line

    def connect(ranks: Ranks) -> Engine:
        _check_comm(comm, ranks.size)
        return Engine(
            ranks, runtime_settings, elastic_line.read_loss, create_error=failures.create_exception
        )

    if not elastic_line.is_elastic():
        mpi_cluster.join_if_requested()
        try:
            return connect(rank_variables.read_ranks())
        except PortInUseError as e:
            topology = detection.read_topology()
            if topology.port_variable == "TF_CONFIG":
                raise
            raise own_port.port_error(topology) from e

    def connect_elastic(ranks: Ranks) -> Engine:
        new_engine = connect(ranks)
        elastic_line.set_loss_listener(new_engine.fail_all)
        try:
            new_engine.agree_on_links()
        except HorovodInternalError:
            new_engine.close()
            raise
        new_engine.all_share_memory = False  # traced functions keep their dtypes in later groups
        return new_engine

    return elastic_line.connect_group(connect_elastic)


def _check_comm(comm: Any, size: int) -> None:
    if comm is None or (isinstance(comm, Sequence) and sorted(comm) in ([], list(range(size)))):
        return
    raise UsageError(
        f"init() got comm={comm!r}; expected None, because MPI is not used. For a subset of the ranks call "
        "hvd.init(process_sets=[hvd.ProcessSet([0, 1])]) and pass process_set= to collectives."
    )


def engine() -> Engine:
    """Returns the collectives runtime. Raises ValueError before `init()`."""
    return process_sets_lib.require_engine(_engine)


def is_initialized() -> bool:
    """Returns True after `init()` and before `shutdown()`."""
    return _engine is not None


def has_peers() -> bool:
    """Returns True if the current group has several ranks."""
    return _engine is not None and _engine.ranks.size > 1


def rank() -> int:
    """Returns the rank of this process, from 0 to `size() - 1`."""
    return engine().ranks.rank


def size() -> int:
    """Returns the number of processes."""
    return engine().ranks.size


def local_rank() -> int:
    """Returns the rank of this process on its host, which is also the index of its GPU."""
    return engine().ranks.local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return engine().ranks.local_size


def cross_rank() -> int:
    """Returns the index of this host among the hosts that have this local rank."""
    return engine().ranks.cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have this local rank."""
    return engine().ranks.cross_size


def is_homogeneous() -> bool:
    """Returns True if all hosts have the same number of processes."""
    return engine().ranks.is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts writing a Chrome trace of all collectives on rank 0. A no-op on other ranks.

    Args:
      file_path: Path of the file (JSON).
      mark_cycles: True to include the cycles of the coordinator.
    """
    if engine().ranks.rank == 0:
        engine().timeline.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Completes and closes the file of `start_timeline`."""
    engine().timeline.stop()
