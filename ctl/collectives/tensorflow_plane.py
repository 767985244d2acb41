"""TensorFlow's collectives in the coordinator's order: tensors of GPUs go by NCCL, not through the host.

A thread of its own runs them, since one waits until all ranks have begun it: the engine goes on
listening, and aborts what can never end. Numbers that are not added travel as float32 words, unread.
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
_SMALL = 1 << 20  # bytes of a tensor that is joined with others
_FIRST_TASK = 1000  # TensorFlow orders tasks as text
_LEADER = f"/job:worker/replica:0/task:{_FIRST_TASK}"
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_planes = itertools.count()  # made in this process; no two may share the keys of their collectives


def has_gpus() -> bool:
    """Whether TensorFlow sees a GPU; asked without waking drivers where there are none."""
    return any(map(os.path.exists, _GPU_FILES)) and bool(tf.config.list_physical_devices("GPU"))


def join_plane(engine: Engine, word: str) -> None:
    """Gives the engine its plane if all ranks want it: by "tensorflow", or by "auto" where there are GPUs.

    All ranks call it, with any word. Raises UsageError where TensorFlow has begun before.
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
    """Whether TensorFlow has made a tensor, or runs sessions: how it is set up is decided then."""
    return not tf.executing_eagerly() or eager_context.is_context_initialized()


class TensorFlowPlane:
    """Carries out collectives of one engine.

    Args:
      addresses: "host:port" at which each rank's TensorFlow listens.
      gpus_only: what is in the host's memory goes another way.
    """

    def __init__(self, engine: Engine, addresses: Sequence[str], *, gpus_only: bool):
        self.gpus_only = gpus_only
        self._engine, self._number = engine, next(_planes)
        self._runs: Counter[tuple[int, ...]] = Counter()  # of each set of ranks
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        address_by_task = {_FIRST_TASK + rank: address for rank, address in enumerate(addresses)}
        collective_runtime.enable_collectives(_FIRST_TASK + engine.place.rank, address_by_task, _LEADER)
        self._thread = threading.Thread(target=self._run, name="hvd-tensorflow", daemon=True)
        self._thread.start()

    def carries(self, kind: str, tensors: Sequence[Any]) -> bool:
        """Whether a collective goes this way: by its kind, and the types and devices of its tensors."""
        if not tensors or not all(isinstance(t, tf.Tensor) for t in tensors):
            return False
        if self.gpus_only and not all(map(_is_on_gpu, tensors)):
            return False
        is_added = kind in ("allreduce", "reducescatter")
        types = {tensor.dtype for tensor in tensors}
        return tf.string not in types and not (is_added and types - {*_ADDED, *_WIDER})

    def begin(self, found: Sequence[Pending], header: dict[str, Any]) -> None:
        """Queues what the coordinator has said all ranks are to do now."""
        self._queue.put(lambda: self._carry_out(found, header))

    def joined(self, flat: Sequence[Any]) -> Any:
        """One flat tensor of several."""
        with scope_of(flat[0]):
            return tf.concat(flat, axis=0) if len(flat) > 1 else flat[0]

    def parted(self, joined: Any, counts: Sequence[int]) -> list[Any]:
        """The flat tensors of so many elements in one."""
        with scope_of(joined):
            return tf.split(joined, counts) if len(counts) > 1 else [joined]

    def abort(self, why: str) -> None:
        """A rank is gone: whoever waits for it here stops waiting."""
        collective_runtime.abort_collectives(why)

    def close(self) -> None:
        """Takes no more."""
        self._queue.put(None)

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            act()

    def _carry_out(self, found: Sequence[Pending], header: dict[str, Any]) -> None:
        ranks = tuple(header["ranks"])
        collective = _Collective(self, ranks, ranks.index(self._engine.place.rank))
        try:
            if found[0].request.kind == "allreduce":  # only these come several at a time
                results = _reduced_together(self, collective, found)
            else:
                results = [self._results(found[0], header, collective)]
        except Exception as e:  # whoever waits must be told
            message = getattr(e, "message", str(e))
            for pending in found:
                lost = failure("LOST", f"{pending.request}: TensorFlow's collective failed: {message}")
                self._engine.finish(pending.request.id, error=lost)
        else:
            for pending, result in zip(found, results, strict=True):
                self._engine.finish(pending.request.id, result=result, more=header)

    def _results(self, pending: Pending, header: dict[str, Any], collective: "_Collective") -> list[Any]:
        """Flat tensors."""
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
        """What names the next collective of these ranks, the same on each of them."""
        self._runs[ranks] += 1
        key = zlib.crc32(f"{self._number} {ranks}".encode()) & 0x7FFFFFFF
        return {"group_size": len(ranks), "group_key": key, "instance_key": self._runs[ranks]}


def _is_on_gpu(tensor: Any) -> bool:
    return "GPU:" in tensor.device


def scope_of(tensor: Any) -> Any:
    """The scope of an eager tensor's device; within a graph's call it has another job's name."""
    return tf.device("/device:" + tensor.device.rpartition("device:")[2])


def _row(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])


class _Collective:
    """Of some ranks, on flat tensors."""

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
        """`counts` elements of each rank, one after the other."""
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
        """`splits` of each rank: rows for each."""
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
        """This rank's rows of the sum; TensorFlow scatters on GPUs only."""
        first = row * sum(rows[: self._me])
        return self.reduced(tensor, op)[first : first + row * rows[self._me]]


def _reduced_together(
    plane: TensorFlowPlane, collective: _Collective, found: Sequence[Pending]
) -> list[list[Any]]:
    """The flat results of all-reduces; small tensors of a type are joined, in one order on all ranks."""
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
    """A flat tensor's memory as float32, as long as that of `count` elements; it is not computed with."""
    size = _bytes(tensor) if count is None else count * tensor.dtype.size
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    octets = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])
    padded = tf.pad(octets, [[0, -(-size // _WORD) * _WORD - len(octets)]])
    return tf.bitcast(tf.reshape(padded, [-1, _WORD]), tf.float32)


def _of_words(words: Any, dtype: Any, size: int) -> Any:
    """The flat tensor of a type in the first `size` bytes."""
    octets = tf.reshape(tf.bitcast(words, tf.uint8), [-1])[:size]
    if dtype == tf.bool:
        return tf.cast(octets, tf.bool)
    if dtype.size == 1:
        return tf.bitcast(octets, dtype)
    return tf.bitcast(tf.reshape(octets, [-1, dtype.size]), dtype)


def scaled_tensor(tensor: Any, factor: float) -> Any:
    """As `arithmetic.scaled`."""
    if factor == 1.0:
        return tensor
    with scope_of(tensor):
        if tensor.dtype in _HALVES:
            return tf.cast(tf.cast(tensor, tf.float32) * np.float32(factor), tensor.dtype)
        if not tensor.dtype.is_floating:
            return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
        return tensor * tf.cast(factor, tensor.dtype)


def finished_tensor(total: Any, op: int, count: int, postscale: float) -> Any:
    """As `arithmetic.finished`."""
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
    """As `tf.numpy_function`, of tensors that stay where they are; `tf.py_function` is always stateful."""
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
