"""Collectives on Python objects."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from ctl.errors import UsageError
from ctl.hvd import packing, process
from ctl.hvd.process_sets import ProcessSet, global_process_set, resolve_process_set

_PICKLED = b"P"
_PACKED = b"J"


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    allow_pickle: bool = False,
) -> Any:
    """Returns the object of `root_rank` on every rank. Collective. The root gets its own object unchanged.

    Args:
      obj: The object: None, a number, string, bytes, list, tuple, set, dict, NumPy array or eager tensor.
        Objects may contain others. Only that of `root_rank` is used.
      root_rank: Rank in the job, also with a process set.
      session: Ignored.
      name: Name that pairs the calls of different ranks.
      process_set: Participating ranks.
      allow_pickle: True on all ranks to pickle other objects. Use it only if every rank is trusted, because
        unpickling can execute code.

    Raises:
      UsageError: On every rank, for another object without `allow_pickle`, or another root rank.
    """
    packed_object = _pack_object(obj, allow_pickle) if process.rank() == root_rank else b""
    index = _find_index(root_rank, process_set)
    received = _gather_bytes(packed_object, f"HorovodBroadcastObject.{name or ''}", process_set)[index]
    if process.rank() == root_rank:
        _unpack_object(received, allow_pickle)
        return obj
    return _unpack_object(received, allow_pickle)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """Returns the objects of all ranks in order. Collective.

    Args:
      obj: The object of this rank. For the types see `broadcast_object`.
      session: Ignored.
      name: Name that pairs the calls of different ranks.
      process_set: Participating ranks.
      allow_pickle: True on all ranks to pickle other objects.
    """
    parts = _gather_bytes(
        _pack_object(obj, allow_pickle), f"HorovodAllgatherObject.{name or ''}", process_set
    )
    return [_unpack_object(part, allow_pickle) for part in parts]


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns a function that calls `broadcast_object` with its argument. See there for the arguments."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def _find_index(root_rank: int, process_set: Any) -> int:
    _, ranks = resolve_process_set(process_set)
    if root_rank not in ranks:
        raise UsageError(f"the root rank is {root_rank}; expected one of {list(ranks)}.")
    return ranks.index(root_rank)


def _pack_object(obj: Any, allow_pickle: bool) -> bytes:
    """Serializes an object, or an error message, which all ranks raise."""
    try:
        return _PACKED + packing.serialize_object(obj)
    except UsageError as e:
        if allow_pickle:
            return _PICKLED + pickle.dumps(obj)
        return b"E" + str(e).encode()


def _unpack_object(data: bytes, allow_pickle: bool) -> Any:
    marker, content = data[:1], data[1:]
    if marker == _PACKED:
        return packing.deserialize_object(content)
    if marker == _PICKLED and allow_pickle:
        return pickle.loads(content)  # enabled explicitly
    if marker == _PICKLED:
        raise UsageError(
            "received a pickled object, but allow_pickle is False on this rank; expected the same "
            "allow_pickle on all ranks."
        )
    raise UsageError(content.decode())


def _gather_bytes(own_bytes: bytes, name: str, process_set: Any) -> Sequence[bytes]:
    number, _ = resolve_process_set(process_set)
    engine = process.engine()
    pending = engine.submit("allgather", name, [np.frombuffer(own_bytes, np.uint8)], process_set=number)
    joined = engine.wait(pending)[0].tobytes()
    parts, start = [], 0
    for (rows,) in (pending.response or {})["rows"]:
        parts.append(joined[start : start + rows])
        start += rows
    return parts
