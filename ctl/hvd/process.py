"""Membership of this process in the group of ranks: initialization, shutdown, rank and size."""

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ctl.collectives import graph_errors, settings
from ctl.collectives.engine import Engine
from ctl.collectives.errors import PortInUseError
from ctl.collectives.ranks import Ranks
from ctl.collectives.settings import Settings
from ctl.distribute import own_port, rank_variables
from ctl.distribute.platforms import detection
from ctl.errors import UsageError
from ctl.hvd import process_sets as process_sets_lib
from ctl.io import exit_hook
from ctl.supervision import heartbeat
from ctl.tensorflow_patches import keras_compilation

_engine: Engine | None = None
_lock = threading.RLock()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins the group of ranks. Returns when all ranks have connected. Further calls are no-ops.

    Args:
      comm: None, or all ranks. For a part of them use a process set.
      process_sets: Initial `ProcessSet`s, equal on all ranks, or "dynamic".

    Raises UsageError for an invalid topology (TF_CONFIG, HOROVOD_*), and HorovodInternalError if some
    ranks do not connect within HOROVOD_START_TIMEOUT seconds.
    """
    global _engine  # noqa: PLW0603  one per process, as ranks are
    with _lock:
        if _engine is None:
            chosen = settings.read_settings()
            made = _met(comm, chosen)
            _let_idle_threads_sleep(made.ranks.local_size)
            _join_plane(made, chosen)
            if chosen.timeline and made.ranks.rank == 0:
                made.timeline.start(chosen.timeline, mark_cycles=chosen.mark_cycles)
            _engine = made
            process_sets_lib.begin(made)
            atexit.register(_leave_at_exit)
            exit_hook.install_exit_codes()
            _begin_to_beat()
            graph_errors.install_graph_errors()
            keras_compilation.install_compilation_check(has_peers)
        process_sets_lib.add_static(process_sets)


def _join_plane(made: Engine, chosen: Settings) -> None:
    from ctl.hvd import elastic_line

    if not elastic_line.is_elastic():
        from ctl.collectives import tensorflow_plane

        tensorflow_plane.join_plane(made, chosen.plane)
        made.agree_on_paths()
    elif chosen.plane == "tensorflow":
        raise UsageError(
            "CTL_COLLECTIVES is 'tensorflow' in an elastic job, whose ranks change; those of TensorFlow's "
            "collectives cannot. Leave CTL_COLLECTIVES out, or start without --host-discovery-script."
        )


def _let_idle_threads_sleep(local_size: int) -> None:
    """Disables the spinning of TensorFlow's idle threads if ranks have fewer than two cores each.

    The cores that this process may use count as shared with the other ranks of its host. Has no effect
    after the first tensor, or in programs of TensorFlow 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if local_size == 1 or cores >= 2 * local_size:
        return
    from ctl.collectives.tensorflow_plane import is_tensorflow_initialized
    from ctl.tensorflow_patches import thread_spinning

    if not is_tensorflow_initialized():
        thread_spinning.disable_thread_spinning()


def _begin_to_beat() -> None:
    """Starts the heartbeats, with which the launcher supervises this process."""
    heartbeat.current.start()
    if heartbeat.current.phase == heartbeat.STARTING:
        heartbeat.current.phase = heartbeat.TRAINING


def shutdown() -> None:
    """Leaves the group. A pending collective that needs this rank raises an error on the other ranks."""
    _leave(linger=False)


def _leave_at_exit() -> None:
    """Leaves the group. Rank 0 answers its peers for a while, unless it ends by an exception."""
    _leave(linger=getattr(sys, "last_value", None) is None)


def _leave(*, linger: bool) -> None:
    global _engine
    with _lock:
        if _engine is not None:
            atexit.unregister(_leave_at_exit)
            left, _engine = _engine, None
            process_sets_lib.end_process_sets()
            left.close(linger=linger)


def _met(comm: Any, chosen: Settings) -> Engine:
    """Returns the engine once all ranks have connected. An elastic job may need several attempts."""
    from ctl.hvd import elastic_line

    def met(place: Ranks) -> Engine:
        _check_comm(comm, place.size)
        return Engine(place, chosen, elastic_line.lost)

    if not elastic_line.is_elastic():
        try:
            return met(rank_variables.read_ranks())
        except PortInUseError as e:
            topology = detection.read_topology()
            if topology.port_variable == "TF_CONFIG":
                raise
            raise own_port.port_error(topology) from e
    made = elastic_line.meet_group(met)
    elastic_line.on_loss(made.fail_all)
    return made


def _check_comm(comm: Any, size: int) -> None:
    if comm is None or (isinstance(comm, Sequence) and sorted(comm) in ([], list(range(size)))):
        return
    raise UsageError(
        f"init() got comm={comm!r}; there is no MPI here. For a part of the ranks write "
        "hvd.init(process_sets=[hvd.ProcessSet([0, 1])]) and give process_set= to collectives."
    )


def engine() -> Engine:
    """Returns the runtime. Raises ValueError before `init()`."""
    return process_sets_lib.initialized(_engine)


def is_initialized() -> bool:
    """Returns True after `init()` and before `shutdown()`."""
    return _engine is not None


def has_peers() -> bool:
    """Returns True if this process is one of several ranks now."""
    return _engine is not None and _engine.ranks.size > 1


def rank() -> int:
    """Returns the rank of this process, from 0."""
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
    """Writes a Chrome trace of all collectives to a file on rank 0. A no-op on other ranks."""
    if engine().ranks.rank == 0:
        engine().timeline.start(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Closes the file of `start_timeline`."""
    engine().timeline.stop()
