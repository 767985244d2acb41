"""Data plane that runs TensorFlow's collectives: NCCL sends tensors on GPUs without a copy to the host.

A separate thread runs the collectives in the coordinator's order, because each one blocks until all ranks
have started it. Meanwhile the engine receives messages, and aborts collectives after the loss of a rank.
Data that is not reduced is sent as float32 words without arithmetic.
"""

import itertools
import math
import os
import queue
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.collectives.arithmetic import AVERAGE, MAX, MIN, PRODUCT, SUM, split_rows
from ctl.collectives.engine import Engine
from ctl.collectives.failures import create_exception
from ctl.collectives.pending import Pending
from ctl.errors import UsageError
from ctl.tensorflow_patches import collective_runtime, eager_context

PLANE = "tensorflow"
_MERGE = {SUM: "Add", AVERAGE: "Add", MIN: "Min", MAX: "Max", PRODUCT: "Mul"}
_ADDED = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
_WIDER = {
    tf.bool: tf.int32, tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}  # fmt: skip
_HALF_DTYPES = (tf.float16, tf.bfloat16)
_WORD = 4  # bytes
_SMALL = 1 << 20  # bytes; smaller tensors are concatenated
_FIRST_TASK = 1000  # task numbers with an equal number of digits, because TensorFlow sorts them as text
_LEADER = f"/job:worker/replica:0/task:{_FIRST_TASK}"
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_planes = itertools.count()  # number of the plane in this process, which separates collective keys


def has_gpus() -> bool:
    """Returns True if TensorFlow lists a GPU. Does not load drivers without a device file."""
    return any(map(os.path.exists, _GPU_FILES)) and bool(tf.config.list_physical_devices("GPU"))


def join_plane(engine: Engine, plane_name: str) -> None:
    """Creates the engine's plane if all ranks request it. Collective.

    Args:
      engine: Engine of this rank.
      plane_name: Setting of this rank. "auto" requests the plane if TensorFlow has GPUs.

    Raises:
      UsageError: If `plane_name` is "tensorflow" and TensorFlow is already initialized.
    """
    if engine.ranks.size == 1:
        return
    was_initialized = is_tensorflow_initialized()
    if plane_name == PLANE and was_initialized:
        raise UsageError(
            "CTL_COLLECTIVES is 'tensorflow', but TensorFlow was initialized before hvd.init(), by a "
            "tensor or a graph. Call hvd.init() first, or set CTL_COLLECTIVES=auto."
        )
    ports = np.zeros(engine.ranks.size, np.int64)
    if plane_name == PLANE or (plane_name == "auto" and has_gpus() and not was_initialized):
        ports[engine.ranks.rank] = _free_port()
    ports = engine.sum("ports of TensorFlow's servers", ports)
    if all(ports):
        hosts = [address.rpartition(":")[0] for address in engine.ranks.addresses]
        addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        engine.plane = TensorFlowPlane(engine, addresses, gpus_only=plane_name != PLANE)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        return server.getsockname()[1]


def is_tensorflow_initialized() -> bool:
    """Returns True if TensorFlow is initialized or runs sessions. Its configuration is then final."""
    return not tf.executing_eagerly() or eager_context.is_context_initialized()


class TensorFlowPlane:
    """Data plane of one engine.

    Args:
      engine: Engine of this rank.
      addresses: "host:port" at which TensorFlow listens, by rank.
      gpus_only: True if the plane does not transfer tensors in host memory.
    """

    def __init__(self, engine: Engine, addresses: Sequence[str], *, gpus_only: bool):
        self.gpus_only = gpus_only
        self._engine, self._number = engine, next(_planes)
        self._runs: Counter[tuple[int, ...]] = Counter()  # number of collectives by set of ranks
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        address_by_task = {_FIRST_TASK + rank: address for rank, address in enumerate(addresses)}
        collective_runtime.enable_collectives(_FIRST_TASK + engine.ranks.rank, address_by_task, _LEADER)
        self._thread = threading.Thread(target=self._run, name="hvd-tensorflow", daemon=True)
        self._thread.start()

    def can_execute(self, collective_kind: str, tensors: Sequence[Any]) -> bool:
        """Returns True if the plane supports this collective with the dtypes and devices of `tensors`."""
        if not tensors or not all(isinstance(t, tf.Tensor) for t in tensors):
            return False
        if self.gpus_only and not all(map(_is_on_gpu, tensors)):
            return False
        is_added = collective_kind in ("allreduce", "reducescatter")
        types = {tensor.dtype for tensor in tensors}
        return tf.string not in types and not (is_added and types - {*_ADDED, *_WIDER})

    def begin(self, pending_collectives: Sequence[Pending], header: dict[str, Any]) -> None:
        """Adds collectives that the coordinator has scheduled to the queue of the thread."""
        self._queue.put(lambda: self._execute(pending_collectives, header))

    def concatenate(self, flat: Sequence[Any]) -> Any:
        """Returns the concatenation of flat tensors."""
        with device_scope(flat[0]):
            return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]

    def split(self, joined: Any, counts: Sequence[int]) -> list[Any]:
        """Splits a concatenation. `counts` are the numbers of elements of the parts."""
        with device_scope(joined):
            return tf.split(joined, counts) if len(counts) > 1 else [joined]

    def abort(self, reason: str) -> None:
        """Aborts the collectives that wait for a lost rank."""
        collective_runtime.abort_collectives(reason)

    def close(self) -> None:
        """Ends the thread after the queued collectives."""
        self._queue.put(None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()

    def _execute(self, pending_collectives: Sequence[Pending], header: dict[str, Any]) -> None:
        ranks = tuple(header["ranks"])
        collective = _Collective(self, ranks, ranks.index(self._engine.ranks.rank))
        try:
            if pending_collectives[0].request.kind == "allreduce":  # only all-reduces are fused
                results = _all_reduce_fused(self, collective, pending_collectives)
            else:
                results = [self._results(pending_collectives[0], header, collective)]
        except Exception as e:  # waiting threads need the error
            message = getattr(e, "message", str(e))
            for pending in pending_collectives:
                error = create_exception(
                    "LOST", f"{pending.request}: TensorFlow's collective failed: {message}"
                )
                self._engine.finish(pending.request.id, error=error)
        else:
            for pending, result in zip(pending_collectives, results, strict=True):
                self._engine.finish(pending.request.id, result=result, response=header)

    def _results(self, pending: Pending, header: dict[str, Any], collective: "_Collective") -> list[Any]:
        """Returns the flat results."""
        request, tensors = pending.request, pending.tensors
        ranks = header["ranks"]
        if request.kind == "broadcast":
            return [collective.broadcast(tensor, ranks.index(request.root)) for tensor in tensors]
        if request.kind == "alltoall":
            return [collective.all_to_all(tensors[0], _row_size(request.shapes[0]), header["splits"])]
        if request.kind == "allgather":
            return [
                collective.all_gather(
                    t, [rows[i] * _row_size(request.shapes[i]) for rows in header["rows"]]
                )
                for i, t in enumerate(tensors)
            ]
        return [
            collective.reduce_scatter(t, split_rows(shape[0], len(ranks)), _row_size(shape), request.op)
            for t, shape in zip(tensors, request.shapes, strict=True)
        ]

    def next_keys(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """Returns the group and instance keys of the next collective of `ranks`, equal on all of them."""
        self._runs[ranks] += 1
        key = zlib.crc32(f"{self._number} {ranks}".encode()) & 0x7FFFFFFF
        return {"group_size": len(ranks), "group_key": key, "instance_key": self._runs[ranks]}


def _is_on_gpu(tensor: Any) -> bool:
    return "GPU:" in tensor.device


def device_scope(tensor: Any) -> Any:
    """Returns a scope for the device of an eager tensor, without its job name, which differs in graphs."""
    return tf.device("/device:" + tensor.device.rpartition("device:")[2])


def _row_size(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


class _Collective:
    """Collectives of a set of ranks on flat tensors."""

    def __init__(self, plane: TensorFlowPlane, ranks: tuple[int, ...], me: int):
        self._plane, self._ranks, self._me = plane, ranks, me

    def all_reduce(self, tensor: Any, op: int) -> Any:
        if len(self._ranks) == 1 or not len(tensor):
            return tf.identity(tensor)
        with device_scope(tensor):
            widened = tf.cast(tensor, _WIDER.get(tensor.dtype, tensor.dtype))
            options = {"merge_op": _MERGE[op], "final_op": "Id", "ordering_token": []}
            total = tf.raw_ops.CollectiveReduceV2(
                input=widened, **options, **self._plane.next_keys(self._ranks)
            )
            return tf.cast(total, tensor.dtype)

    def broadcast(self, tensor: Any, root: int) -> Any:
        if len(self._ranks) == 1 or not len(tensor):
            return tf.identity(tensor)
        with device_scope(tensor):
            float_words, size = _to_words(tensor), _num_bytes(tensor)
            keys = self._plane.next_keys(self._ranks)
            if self._me == root:
                tf.raw_ops.CollectiveBcastSendV2(input=float_words, **keys)
                return tf.identity(tensor)
            received_words = tf.raw_ops.CollectiveBcastRecvV2(
                T=tf.float32, shape=tf.shape(float_words), **keys
            )
            return _from_words(received_words, tensor.dtype, size)

    def all_gather(self, tensor: Any, counts: Sequence[int]) -> Any:
        """Returns the concatenation of `counts` elements of each rank."""
        if len(self._ranks) == 1 or not max(counts):
            return tf.identity(tensor)
        with device_scope(tensor):
            parts = self._gather_words(_to_words(tensor, max(counts)))
            sizes = [count * tensor.dtype.size for count in counts]
            return tf.concat(
                [_from_words(p, tensor.dtype, s) for p, s in zip(parts, sizes, strict=True)], axis=0
            )

    def _gather_words(self, float_words: Any) -> Any:
        keys = self._plane.next_keys(self._ranks)
        gathered = tf.raw_ops.CollectiveGatherV2(input=float_words, ordering_token=[], **keys)
        return tf.reshape(gathered, [len(self._ranks), -1])

    def all_to_all(self, tensor: Any, row: int, splits: Sequence[Sequence[int]]) -> Any:
        """Exchanges rows. `splits` are the numbers of rows by source rank and destination rank."""
        largest = row * max(max(counts) for counts in splits)
        if len(self._ranks) == 1 or not largest:
            return tf.identity(tensor)
        with device_scope(tensor):
            parts = tf.split(tensor, [row * count for count in splits[self._me]])
            float_words = tf.stack([_to_words(part, largest) for part in parts])
            keys = self._plane.next_keys(self._ranks)
            received_words = tf.raw_ops.CollectiveAllToAllV2(input=float_words, ordering_token=[], **keys)
            sizes = [row * counts[self._me] * tensor.dtype.size for counts in splits]
            return tf.concat(
                [_from_words(p, tensor.dtype, s) for p, s in zip(received_words, sizes, strict=True)],
                axis=0,
            )

    def reduce_scatter(self, tensor: Any, rows: Sequence[int], row: int, op: int) -> Any:
        """Returns this rank's rows of the sum. TensorFlow's reduce-scatter supports GPUs only."""
        first = row * sum(rows[: self._me])
        return self.all_reduce(tensor, op)[first : first + row * rows[self._me]]


def _all_reduce_fused(
    plane: TensorFlowPlane, collective: _Collective, pending_collectives: Sequence[Pending]
) -> list[list[Any]]:
    """Returns the flat results of fused all-reduces. Small tensors of a dtype are concatenated."""
    op = pending_collectives[0].request.op
    tensors = [tensor for pending in pending_collectives for tensor in pending.tensors]
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype if _num_bytes(tensor) <= _SMALL else i, []).append(i)
    results: list[Any] = [None] * len(tensors)
    for indices in groups.values():
        total = collective.all_reduce(plane.concatenate([tensors[i] for i in indices]), op)
        for i, part in zip(indices, plane.split(total, [len(tensors[i]) for i in indices]), strict=True):
            results[i] = part
    remaining_results = iter(results)
    return [[next(remaining_results) for _ in pending.tensors] for pending in pending_collectives]


def _num_bytes(tensor: Any) -> int:
    return len(tensor) * tensor.dtype.size


def _to_words(tensor: Any, count: int | None = None) -> Any:
    """Reinterprets a flat tensor as float32 words, padded to the size of `count` elements."""
    size = _num_bytes(tensor) if count is None else count * tensor.dtype.size
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    octets = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
    padded = tf.pad(octets, [[0, -(-size // _WORD) * _WORD - len(octets)]])
    return tf.bitcast(tf.reshape(padded, [-1, _WORD]), tf.float32)


def _from_words(float_words: Any, dtype: Any, size: int) -> Any:
    """Reinterprets the first `size` bytes of float32 words as a flat tensor of a dtype."""
    octets = tf.reshape(tf.bitcast(float_words, tf.uint8), [-1])[:size]
    if dtype == tf.bool:
        return tf.cast(octets, tf.bool)
    if dtype.size == 1:
        return tf.bitcast(octets, dtype)
    return tf.bitcast(tf.reshape(octets, [-1, dtype.size]), dtype)


def scale_tensor(tensor: Any, factor: float) -> Any:
    """Returns `tensor * factor` with the rounding of `arithmetic.scale_array`."""
    if factor == 1.0:
        return tensor
    with device_scope(tensor):
        if tensor.dtype in _HALF_DTYPES:
            return tf.cast(tf.cast(tensor, tf.float32) * np.float32(factor), tensor.dtype)
        if not tensor.dtype.is_floating:
            return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
        return tensor * tf.cast(factor, tensor.dtype)


def finish_tensor(total: Any, op: int, count: int, postscale: float) -> Any:
    """Returns the final value of a reduction like `arithmetic.finish_reduction`."""
    mean = _mean(total, count) if op == AVERAGE and count > 1 else total
    return scale_tensor(mean, postscale)


def _mean(total: Any, count: int) -> Any:
    with device_scope(total):
        if total.dtype in _HALF_DTYPES:
            return tf.cast(tf.cast(total, tf.float32) / np.float32(count), total.dtype)
        if total.dtype.is_floating:
            return total / tf.cast(count, total.dtype)
        quotient = tf.truncatediv(tf.cast(total, tf.int64), tf.constant(count, tf.int64))
        return tf.cast(quotient, total.dtype)


def tensor_function(function: Any, inputs: list, types: Any, *, stateful: bool, name: str = "take") -> Any:
    """Adds a node that calls `function`, without a copy of tensors to the host.

    Unlike `tf.py_function`, the node is not stateful unless `stateful`.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    if stateful or not isinstance(graph, tf.__internal__.FuncGraph):
        return tf.py_function(function, inputs, types, name=name)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    body = tf.function(lambda *tensors: tf.py_function(function, tensors, types), autograph=False)
    concrete = body.get_concrete_function(*specs)
    concrete.add_to_graph(graph)
    type_list = types if isinstance(types, list) else [types]
    outputs = tf.raw_ops.PartitionedCall(args=inputs, Tout=type_list, f=concrete, name=name)
    return outputs if isinstance(types, list) else outputs[0]
