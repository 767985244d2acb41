"""Data plane that runs TensorFlow's collectives: NCCL sends tensors on GPUs without a copy to the host.

A separate thread runs the collectives in the coordinator's order, because each one blocks until all ranks
have started it. Meanwhile the engine receives messages, and aborts a collective that cannot finish. Data
that is not reduced is sent as float32 words without arithmetic.
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
from ctl.collectives.arithmetic import AVERAGE, MAX, MIN, PRODUCT, SUM, rows_of
from ctl.collectives.engine import Engine
from ctl.collectives.failures import failure
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
_HALVES = (tf.float16, tf.bfloat16)
_WORD = 4  # bytes
_SMALL = 1 << 20  # bytes; smaller tensors are concatenated
_FIRST_TASK = 1000  # equal number of digits, as TensorFlow sorts tasks as text
_LEADER = f"/job:worker/replica:0/task:{_FIRST_TASK}"
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_planes = itertools.count()  # number of the plane in this process, which separates collective keys


def has_gpus() -> bool:
    """Returns True if TensorFlow lists a GPU. Does not load drivers without a device file."""
    return any(map(os.path.exists, _GPU_FILES)) and bool(tf.config.list_physical_devices("GPU"))


def join_plane(engine: Engine, word: str) -> None:
    """Creates the engine's plane if all ranks request it: by "tensorflow", or by "auto" if they have GPUs.

    All ranks call it, with any `word`. Raises UsageError for "tensorflow" if TensorFlow is already
    initialised.
    """
    if engine.place.size == 1:
        return
    began = has_begun()
    if word == PLANE and began:
        raise UsageError(
            "CTL_COLLECTIVES is 'tensorflow', and TensorFlow had made a tensor, or a session's graph, "
            "before hvd.init(). Call hvd.init() first, or use CTL_COLLECTIVES=auto."
        )
    ports = np.zeros(engine.place.size, np.int64)
    if word == PLANE or (word == "auto" and has_gpus() and not began):
        ports[engine.place.rank] = _free_port()
    ports = engine.sum("ports of TensorFlow's servers", ports)
    if all(ports):
        hosts = [address.rpartition(":")[0] for address in engine.place.addresses]
        addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        engine.plane = TensorFlowPlane(engine, addresses, gpus_only=word != PLANE)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        return server.getsockname()[1]


def has_begun() -> bool:
    """Returns True if TensorFlow is initialised or runs sessions, so that its setup is final."""
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
        collective_runtime.enable_collectives(_FIRST_TASK + engine.place.rank, address_by_task, _LEADER)
        self._thread = threading.Thread(target=self._run, name="hvd-tensorflow", daemon=True)
        self._thread.start()

    def carries(self, kind: str, tensors: Sequence[Any]) -> bool:
        """Returns True if the plane can execute a collective of this kind with the dtypes and devices."""
        if not tensors or not all(isinstance(t, tf.Tensor) for t in tensors):
            return False
        if self.gpus_only and not all(map(_is_on_gpu, tensors)):
            return False
        is_added = kind in ("allreduce", "reducescatter")
        types = {tensor.dtype for tensor in tensors}
        return tf.string not in types and not (is_added and types - {*_ADDED, *_WIDER})

    def begin(self, found: Sequence[Pending], header: dict[str, Any]) -> None:
        """Queues collectives that the coordinator has scheduled."""
        self._queue.put(lambda: self._carry_out(found, header))

    def joined(self, flat: Sequence[Any]) -> Any:
        """Returns the concatenation of flat tensors."""
        with scope_of(flat[0]):
            return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]

    def parted(self, joined: Any, counts: Sequence[int]) -> list[Any]:
        """Returns the parts of a concatenation. `counts` are the elements of each part."""
        with scope_of(joined):
            return tf.split(joined, counts) if len(counts) > 1 else [joined]

    def abort(self, why: str) -> None:
        """Ends the collectives that wait for a lost rank."""
        collective_runtime.abort_collectives(why)

    def close(self) -> None:
        """Ends the thread after the queued collectives."""
        self._queue.put(None)

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            act()

    def _carry_out(self, found: Sequence[Pending], header: dict[str, Any]) -> None:
        ranks = tuple(header["ranks"])
        collective = _Collective(self, ranks, ranks.index(self._engine.place.rank))
        try:
            if found[0].request.kind == "allreduce":  # only all-reduces are fused
                results = _reduced_together(self, collective, found)
            else:
                results = [self._results(found[0], header, collective)]
        except Exception as e:  # waiting threads need the error
            message = getattr(e, "message", str(e))
            for pending in found:
                lost = failure("LOST", f"{pending.request}: TensorFlow's collective failed: {message}")
                self._engine.finish(pending.request.id, error=lost)
        else:
            for pending, result in zip(found, results, strict=True):
                self._engine.finish(pending.request.id, result=result, more=header)

    def _results(self, pending: Pending, header: dict[str, Any], collective: "_Collective") -> list[Any]:
        """Returns the flat results."""
        request, tensors = pending.request, pending.tensors
        ranks = header["ranks"]
        if request.kind == "broadcast":
            return [collective.broadcast(tensor, ranks.index(request.root)) for tensor in tensors]
        if request.kind == "alltoall":
            return [collective.exchanged(tensors[0], _row(request.shapes[0]), header["splits"])]
        if request.kind == "allgather":
            return [
                collective.gathered(t, [rows[i] * _row(request.shapes[i]) for rows in header["rows"]])
                for i, t in enumerate(tensors)
            ]
        return [
            collective.scattered(t, rows_of(shape[0], len(ranks)), _row(shape), request.op)
            for t, shape in zip(tensors, request.shapes, strict=True)
        ]

    def keys(self, ranks: tuple[int, ...]) -> dict[str, Any]:
        """Returns the group and instance keys of the ranks' next collective, equal on all of them."""
        self._runs[ranks] += 1
        key = zlib.crc32(f"{self._number} {ranks}".encode()) & 0x7FFFFFFF
        return {"group_size": len(ranks), "group_key": key, "instance_key": self._runs[ranks]}


def _is_on_gpu(tensor: Any) -> bool:
    return "GPU:" in tensor.device


def scope_of(tensor: Any) -> Any:
    """Returns the scope of an eager tensor's device. Its job name differs within a graph's call."""
    return tf.device("/device:" + tensor.device.rpartition("device:")[2])


def _row(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


class _Collective:
    """Collectives of some ranks on flat tensors."""

    def __init__(self, plane: TensorFlowPlane, ranks: tuple[int, ...], me: int):
        self._plane, self._ranks, self._me = plane, ranks, me

    def reduced(self, tensor: Any, op: int) -> Any:
        if len(self._ranks) == 1 or not len(tensor):
            return tf.identity(tensor)
        with scope_of(tensor):
            wide = tf.cast(tensor, _WIDER.get(tensor.dtype, tensor.dtype))
            names = {"merge_op": _MERGE[op], "final_op": "Id", "ordering_token": []}
            total = tf.raw_ops.CollectiveReduceV2(input=wide, **names, **self._plane.keys(self._ranks))
            return tf.cast(total, tensor.dtype)

    def broadcast(self, tensor: Any, root: int) -> Any:
        if len(self._ranks) == 1 or not len(tensor):
            return tf.identity(tensor)
        with scope_of(tensor):
            words, size = _words(tensor), _bytes(tensor)
            keys = self._plane.keys(self._ranks)
            if self._me == root:
                tf.raw_ops.CollectiveBcastSendV2(input=words, **keys)
                return tf.identity(tensor)
            found = tf.raw_ops.CollectiveBcastRecvV2(T=tf.float32, shape=tf.shape(words), **keys)
            return _of_words(found, tensor.dtype, size)

    def gathered(self, tensor: Any, counts: Sequence[int]) -> Any:
        """Returns the concatenation of `counts` elements of each rank."""
        if len(self._ranks) == 1 or not max(counts):
            return tf.identity(tensor)
        with scope_of(tensor):
            parts = self._gathered_words(_words(tensor, max(counts)))
            sizes = [count * tensor.dtype.size for count in counts]
            return tf.concat(
                [_of_words(p, tensor.dtype, s) for p, s in zip(parts, sizes, strict=True)], axis=0
            )

    def _gathered_words(self, words: Any) -> Any:
        keys = self._plane.keys(self._ranks)
        found = tf.raw_ops.CollectiveGatherV2(input=words, ordering_token=[], **keys)
        return tf.reshape(found, [len(self._ranks), -1])

    def exchanged(self, tensor: Any, row: int, splits: Sequence[Sequence[int]]) -> Any:
        """Exchanges rows. `splits` are the numbers of rows by source rank and destination rank."""
        largest = row * max(max(counts) for counts in splits)
        if len(self._ranks) == 1 or not largest:
            return tf.identity(tensor)
        with scope_of(tensor):
            parts = tf.split(tensor, [row * count for count in splits[self._me]])
            words = tf.stack([_words(part, largest) for part in parts])
            keys = self._plane.keys(self._ranks)
            found = tf.raw_ops.CollectiveAllToAllV2(input=words, ordering_token=[], **keys)
            sizes = [row * counts[self._me] * tensor.dtype.size for counts in splits]
            return tf.concat(
                [_of_words(p, tensor.dtype, s) for p, s in zip(found, sizes, strict=True)], axis=0
            )

    def scattered(self, tensor: Any, rows: Sequence[int], row: int, op: int) -> Any:
        """Returns this rank's rows of the sum. TensorFlow's reduce-scatter supports GPUs only."""
        first = row * sum(rows[: self._me])
        return self.reduced(tensor, op)[first : first + row * rows[self._me]]


def _reduced_together(
    plane: TensorFlowPlane, collective: _Collective, found: Sequence[Pending]
) -> list[list[Any]]:
    """Returns flat results of all-reduces. Small tensors of a dtype are concatenated in the same order."""
    op = found[0].request.op
    tensors = [tensor for pending in found for tensor in pending.tensors]
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype if _bytes(tensor) <= _SMALL else i, []).append(i)
    results: list[Any] = [None] * len(tensors)
    for places in groups.values():
        total = collective.reduced(plane.joined([tensors[i] for i in places]), op)
        for i, part in zip(places, plane.parted(total, [len(tensors[i]) for i in places]), strict=True):
            results[i] = part
    left = iter(results)
    return [[next(left) for _ in pending.tensors] for pending in found]


def _bytes(tensor: Any) -> int:
    return len(tensor) * tensor.dtype.size


def _words(tensor: Any, count: int | None = None) -> Any:
    """Returns the memory of a flat tensor as float32 words, padded to the size of `count` elements."""
    size = _bytes(tensor) if count is None else count * tensor.dtype.size
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    octets = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
    padded = tf.pad(octets, [[0, -(-size // _WORD) * _WORD - len(octets)]])
    return tf.bitcast(tf.reshape(padded, [-1, _WORD]), tf.float32)


def _of_words(words: Any, dtype: Any, size: int) -> Any:
    """Returns the flat tensor of a dtype in the first `size` bytes."""
    octets = tf.reshape(tf.bitcast(words, tf.uint8), [-1])[:size]
    if dtype == tf.bool:
        return tf.cast(octets, tf.bool)
    if dtype.size == 1:
        return tf.bitcast(octets, dtype)
    return tf.bitcast(tf.reshape(octets, [-1, dtype.size]), dtype)


def scaled_tensor(tensor: Any, factor: float) -> Any:
    """Scales a tensor like `arithmetic.scaled`."""
    if factor == 1.0:
        return tensor
    with scope_of(tensor):
        if tensor.dtype in _HALVES:
            return tf.cast(tf.cast(tensor, tf.float32) * np.float32(factor), tensor.dtype)
        if not tensor.dtype.is_floating:
            return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
        return tensor * tf.cast(factor, tensor.dtype)


def finished_tensor(total: Any, op: int, count: int, postscale: float) -> Any:
    """Finishes a reduction like `arithmetic.finished`."""
    mean = _mean(total, count) if op == AVERAGE and count > 1 else total
    return scaled_tensor(mean, postscale)


def _mean(total: Any, count: int) -> Any:
    with scope_of(total):
        if total.dtype in _HALVES:
            return tf.cast(tf.cast(total, tf.float32) / np.float32(count), total.dtype)
        if total.dtype.is_floating:
            return total / tf.cast(count, total.dtype)
        quotient = tf.truncatediv(tf.cast(total, tf.int64), tf.constant(count, tf.int64))
        return tf.cast(quotient, total.dtype)


def tensor_function(act: Any, given: list, types: Any, *, stateful: bool, name: str = "take") -> Any:
    """Adds a node that calls `act` like `tf.numpy_function`, without a copy of tensors to the host.

    `tf.py_function` itself is always stateful.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    if stateful or not isinstance(graph, tf.__internal__.FuncGraph):
        return tf.py_function(act, given, types, name=name)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given]
    body = tf.function(lambda *tensors: tf.py_function(act, tensors, types), autograph=False)
    concrete = body.get_concrete_function(*specs)
    concrete.add_to_graph(graph)
    several = types if isinstance(types, list) else [types]
    found = tf.raw_ops.PartitionedCall(args=given, Tout=several, f=concrete, name=name)
    return found if isinstance(types, list) else found[0]
