"""All-reduce of a MultiWorkerMirroredStrategy over the engine instead of TensorFlow's gRPC ring.

    engine = connect_engine(topology, limits)
    install_engine(strategy, engine)     # applies to functions traced and operations run afterwards

All collectives of the strategy use the engine: gradients, means, checks for finite values, statistics of
BatchNormalization, decisions of the workers. TensorFlow still broadcasts new variables. The engine
requires one replica per worker, on a CPU.
"""

import atexit
import contextlib
import dataclasses
import itertools
import logging
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from ctl.collectives import graph_errors, tensor_ops
from ctl.collectives.arithmetic import SUM
from ctl.collectives.calls import Call, CollectiveGroup, Members
from ctl.collectives.control_tree import ControlTree
from ctl.collectives.descriptors import check_descriptors
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.failures import create_exception
from ctl.collectives.partners import partners_of
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import read_settings
from ctl.collectives.transfer_costs import NetworkCosts
from ctl.distribute import collective_debug
from ctl.distribute.mpi_cluster import MPI
from ctl.distribute.topology import Topology
from ctl.errors import PeerLostError, UsageError
from ctl.io.authenticated_channel import job_secret
from ctl.io.rendezvous import listening_socket, split_address
from ctl.tensorflow_patches import collective_launchers, coordination_service
from ctl.tensorflow_patches.coordination_service import CoordinationClient

ENGINE_COMMUNICATIONS = ("tcp", MPI)
_engines: weakref.WeakKeyDictionary[Any, Engine] = weakref.WeakKeyDictionary()  # by strategy
_groups: weakref.WeakKeyDictionary[Any, CollectiveGroup] = weakref.WeakKeyDictionary()  # by strategy
_CONNECT_SECS = 60.0
_POLL_SECS = 1.0
_MOST_FAILURES = 3  # consecutive, until a worker counts as lost
_OK = "ok"
_log = logging.getLogger("ctl")
_SILENCE_SECS = 100.0  # as in TensorFlow, if `heartbeat_secs` is 0
_numbers = itertools.count()  # number of the group in this process; equal on all workers


class PeerLimits(NamedTuple):
    """Timeouts of the engine (seconds).

    Attributes:
      heartbeat_secs: Silence after which a worker is lost. 0 selects the default.
      timeout_secs: Duration of one collective. 0 means no timeout.
    """

    heartbeat_secs: float = 0.0
    timeout_secs: float = 0.0


def connect_engine(topology: Topology, limits: PeerLimits, communication: str = "tcp") -> Engine:
    """Connects this worker with all other workers. All workers call it at the same time.

    They exchange addresses through TensorFlow's coordination service. A worker listens at the port after
    that of its address, or at any free port if that one is in use, until all workers are connected.

    Raises UsageError on all workers if one of them cannot open enough files, and PeerLostError on all
    workers if some cannot reach each other. `communication` is one of `ENGINE_COMMUNICATIONS`; with "tcp",
    CTL_COLLECTIVES selects the transport.
    """
    rank, group = topology.worker_index, next(_numbers)
    engine: Engine | None = None
    _check_descriptors_of_all(topology, group)
    with _listening(topology) as server:
        host = (topology.address or "").rpartition(":")[0]
        introduction = f"{host}:{server.getsockname()[1]} {secrets.token_hex(32)}"
        introductions = [text.split() for text in _exchanged(topology, f"{group}/place", introduction)]
        settings = dataclasses.replace(
            read_settings(),
            start_timeout=_CONNECT_SECS,
            secret=job_secret() or introductions[0][1].encode(),
            stall_warning=0.0,
            stall_shutdown=limits.timeout_secs,
            stall_name="--collective_timeout_secs",
            heartbeat_timeout=limits.heartbeat_secs or _SILENCE_SECS,
        )
        if communication == MPI:
            settings = dataclasses.replace(settings, transport=MPI)
        try:
            ranks = build_ranks([address for address, _ in introductions], rank)
            engine = Engine(ranks, settings, server=server, create_error=create_exception)
            engine.agree_on_links()
            error_message = ""
        except (HorovodInternalError, UsageError, OSError) as e:
            error_message = str(e)
    results = _exchanged(topology, f"{group}/met", error_message or "met")
    failures = [text for text in results if text != "met"]
    if failures or engine is None:
        if engine is not None:
            engine.close()
        raise PeerLostError(
            f"communication {communication!r}: the workers cannot reach each other: {failures[0]}"
        )
    graph_errors.install_graph_errors()
    atexit.register(engine.close)
    return engine


def _check_descriptors_of_all(topology: Topology, group: int) -> None:
    """Raises UsageError on all workers with the message of the first one that cannot open enough files."""
    try:
        rank, count = topology.worker_index, topology.num_workers
        tree = ControlTree(count, read_settings().fanout)
        check_descriptors(len(partners_of(count)[rank]), tree.num_connections(rank))
        message = ""
    except UsageError as e:
        message = f"worker {topology.worker_index}: {e}"
    messages = [text for text in _exchanged(topology, f"{group}/files", message or _OK) if text != _OK]
    if messages:
        raise UsageError(f"communication 'tcp': {messages[0]}")


def _listening(topology: Topology) -> socket.socket:
    host, port = split_address(topology.address or ":0")
    for chosen in (port + 1, 0):
        with contextlib.suppress(OSError, OverflowError):
            return listening_socket(host, chosen, everywhere=True)
    raise UsageError(f"communication 'tcp' cannot listen at {host}: no port is free there.")


def _exchanged(topology: Topology, key: str, value: str) -> list[str]:
    """Returns the texts of all workers by rank, exchanged through TensorFlow's coordination service."""
    service = coordination_service.coordination_client()
    jobs = [(job, len(topology.tasks.get(job, ()))) for job in ("chief", "worker")]
    tasks = [f"/job:{job}/replica:0/task:{i}" for job, count in jobs for i in range(count)]
    try:
        service.set_config_key_value(f"ctl/engine/{key}/{topology.worker_index}", value)
        return [_text_of(service, task, f"ctl/engine/{key}/{rank}") for rank, task in enumerate(tasks)]
    except tf.errors.OpError as e:
        text = f"communication: the addresses cannot be exchanged with the other workers: {e.message}"
        raise PeerLostError(text) from e


def _text_of(service: CoordinationClient, task: str, key: str) -> str:
    """Waits for the text of a task. Raises OpError after the timeout, or if the process has ended.

    The service does not end a wait for a process that has ended.
    """
    deadline, num_failures = time.monotonic() + 2 * _CONNECT_SECS, 0
    while True:
        try:
            return service.get_config_key_value(key, int(1000 * _POLL_SECS))
        except tf.errors.DeadlineExceededError:
            if time.monotonic() > deadline:
                raise
        try:
            service.check_collective_ops_peer_health(task, int(1000 * _POLL_SECS))
            num_failures = 0
        except tf.errors.DeadlineExceededError:  # the task is busy, or its process is stopped
            num_failures = 0
        except tf.errors.OpError:
            num_failures += 1
            if num_failures == _MOST_FAILURES:
                raise


def can_use_engine(strategy: tf.distribute.Strategy) -> bool:
    """Returns True if the engine can run the collectives: several workers with one CPU each."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return False
    extended: Any = strategy.extended
    devices = extended.worker_devices
    several = strategy.num_replicas_in_sync > len(devices)
    return (
        several
        and len(devices) == 1
        and "CPU" in devices[0].upper()
        and collective_launchers.can_replace_launchers(strategy)
    )


def install_engine(
    strategy: tf.distribute.Strategy, engine: Engine | None, group: CollectiveGroup | None = None
) -> None:
    """Runs the strategy's collectives on an engine.

    Args:
      strategy: Strategy of the job.
      engine: Engine of this worker. None selects TensorFlow's launchers again.
      group: Ranks of the collectives of traced functions, if they change. None: all ranks of `engine`.
    """
    _engines.pop(strategy, None)
    if engine is None:
        collective_launchers.replace_launchers(strategy, None)
        return
    _engines[strategy], _groups[strategy] = engine, group or _AllWorkers(engine)
    collective_launchers.replace_launchers(strategy, _Launcher(_groups[strategy]))


def use_engine(
    strategy: tf.distribute.Strategy, topology: Topology, limits: PeerLimits, communication: str = "tcp"
) -> None:
    """Connects the workers and installs the engine. Raises UsageError if the strategy cannot use it."""
    if strategy.num_replicas_in_sync == 1:
        return
    if not can_use_engine(strategy):
        devices = ", ".join(strategy.extended.worker_devices)
        raise UsageError(
            f"communication={communication!r} sums tensors in the memory of the host, for strategy "
            f"'multi_worker' with one CPU per worker; this worker's replicas are on {devices}. Write "
            "'auto'."
        )
    install_engine(strategy, connect_engine(topology.without_servers(), limits, communication))


def engine_of(strategy: tf.distribute.Strategy) -> Engine | None:
    """Returns the engine that runs the strategy's collectives, or None for TensorFlow's launchers."""
    return _engines.get(strategy)


def wire_dtype_of(strategy: tf.distribute.Strategy, wire_dtype: str | None) -> str | None:
    """Returns the dtype in which sums of floats are sent. None keeps the dtype of the tensors.

    If all workers share memory, the result is None: the conversion costs more than it saves.
    """
    engine = engine_of(strategy)
    return None if engine is not None and engine.all_share_memory else wire_dtype


class _AllWorkers:
    """All ranks of an engine, as a `calls.CollectiveGroup`."""

    def __init__(self, engine: Engine):
        self._members = Members(engine, 0, tuple(range(engine.ranks.size)))

    def members(self) -> Members:
        return self._members

    def check_registered(self) -> None:
        """Does not raise an error: the group always has members."""


class _Launcher:
    """Replacement of TensorFlow's `CollectiveReplicaLauncher` that runs collectives on the engine."""

    def __init__(self, group: CollectiveGroup):
        self._group = group

    def can_order_nccl(self) -> bool:
        return True

    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> Any:
        return self._sums([tf.convert_to_tensor(input_tensor)])[0]

    def batch_all_reduce(self, input_tensor_packs: Sequence[Sequence[Any]], options: Any = None) -> list:
        return self._sums([tensor for pack in input_tensor_packs for tensor in pack])

    def all_gather(self, input_tensor: Any, axis: Any, options: Any = None) -> Any:
        tensor = tf.convert_to_tensor(input_tensor)
        axis = int(tf.get_static_value(tf.convert_to_tensor(axis)))
        axis %= tensor.shape.rank
        order = [axis, *(i for i in range(tensor.shape.rank) if i != axis)]
        back = [order.index(i) for i in range(len(order))]
        rows = tensor if axis == 0 else tf.transpose(tensor, order)
        (joined,) = self._gathered([rows])
        return joined if axis == 0 else tf.transpose(joined, back)

    def all_reduce_indexed_slices(self, input_slices: tf.IndexedSlices, options: Any = None) -> Any:
        values, indices = self._gathered([input_slices.values, input_slices.indices])
        return tf.IndexedSlices(values, indices, input_slices.dense_shape)

    def _sums(self, tensors: list) -> list:
        for tensor in tensors:
            collective_debug.announce("all_reduce", tensor.shape, tensor.dtype.name)
        call = Call("allreduce", "", self._group, op=SUM, ignores_scope=True)
        return tensor_ops.run_collective(call, tensors, "ctl.sum", "")

    def _gathered(self, tensors: list) -> Iterator[Any]:
        for tensor in tensors:
            collective_debug.announce("all_gather", tensor.shape, tensor.dtype.name)
        call = Call("allgather", "", self._group, ignores_scope=True)
        return iter(tensor_ops.run_collective(call, tensors, "ctl.gather", "")[:-1])


def sum_flags(strategy: tf.distribute.Strategy, flags: tf.Tensor) -> tf.Tensor:
    """Returns the sum of `flags` over the workers, also in a branch of `tf.cond` that all workers take."""
    call = Call("allreduce", "", _groups[strategy], op=SUM, ignores_scope=True)
    return tensor_ops.run_collective(call, [flags], "ctl.flags", "")[0]


def all_to_all(engine: Engine, rows: tf.Tensor) -> tf.Tensor:
    """Exchanges rows between n workers: `[n * r, ...]` -> `[n * r, ...]`, r rows to and from each."""
    call = Call("alltoall", "", _AllWorkers(engine), ignores_scope=True)
    return tf.ensure_shape(tensor_ops.run_collective(call, [rows], "ctl.all_to_all", "")[0], rows.shape)


def network_record(strategy: tf.distribute.Strategy) -> dict[str, float]:
    """Returns the costs from which the engine selects algorithms. Empty without an engine."""
    engine = engine_of(strategy)
    if engine is None:
        return {}
    return {"latency_secs": engine.network.latency_secs, "byte_secs": engine.network.byte_secs}


def use_recorded_network(strategy: tf.distribute.Strategy, world: Mapping[str, Any]) -> None:
    """Selects algorithms as in the run that saved a checkpoint. All workers call it.

    Sums of floats then have the same order of additions. A no-op without engine, and for a checkpoint of
    another number of workers.

    Args:
      strategy: Strategy of this run.
      world: `Manifest.world` of the checkpoint.
    """
    engine, record = engine_of(strategy), world.get("network")
    if engine is None or not record or world.get("workers") != engine.ranks.size:
        return
    measured = engine.network
    engine.agree_on_links(NetworkCosts(**record))
    if engine.network != measured and engine.ranks.rank == 0:
        _log.info(
            "Collectives use the algorithms of the checkpoint, for a network with %s; measured: %s. "
            "--allow_config_change selects those for the measured values.",
            engine.network,
            measured,
        )


def path_of(strategy: tf.distribute.Strategy) -> str:
    """Returns "tcp" (the engine) or "ring" for a strategy that can use both, else an empty string."""
    if not can_use_engine(strategy):
        return ""
    return "ring" if engine_of(strategy) is None else "tcp"
