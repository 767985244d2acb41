"""Collectives on Python objects."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from ctl.errors import UsageError
from ctl.hvd import packing, process
from ctl.hvd.process_sets import ProcessSet, global_process_set, ranks_of

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
    """Returns the object of `root_rank` on every rank. The root gets its own object unchanged.

    Objects are None, numbers, strings, bytes, lists, tuples, sets, dicts, NumPy arrays and eager
    tensors of these. Other objects raise UsageError on every rank. With `allow_pickle` on all ranks they
    are pickled. Use it only if every rank is trusted, because unpickling can execute code.
    `session` is ignored.
    """
    mine = _packed(obj, allow_pickle) if process.rank() == root_rank else b""
    index = _index(root_rank, process_set)
    found = _gathered(mine, f"HorovodBroadcastObject.{name or ''}", process_set)[index]
    if process.rank() == root_rank:
        _read(found, allow_pickle)
        return obj
    return _read(found, allow_pickle)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    allow_pickle: bool = False,
) -> list[Any]:
    """Returns the objects of all ranks, in order. See `broadcast_object` for the supported types."""
    parts = _gathered(_packed(obj, allow_pickle), f"HorovodAllgatherObject.{name or ''}", process_set)
    return [_read(part, allow_pickle) for part in parts]


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns a function of an object that calls `broadcast_object`."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def _index(root_rank: int, process_set: Any) -> int:
    _, ranks = ranks_of(process_set)
    if root_rank not in ranks:
        raise UsageError(f"the root rank is {root_rank}; expected one of {list(ranks)}.")
    return ranks.index(root_rank)


def _packed(obj: Any, allow_pickle: bool) -> bytes:
    """Returns the packed object, or a packed error message, which all ranks raise."""
    try:
        return _PACKED + packing.packed_arrays(obj)
    except UsageError as e:
        if allow_pickle:
            return _PICKLED + pickle.dumps(obj)
        return b"E" + str(e).encode()


def _read(data: bytes, allow_pickle: bool) -> Any:
    kind, rest = data[:1], data[1:]
    if kind == _PACKED:
        return packing.unpacked(rest)
    if kind == _PICKLED and allow_pickle:
        return pickle.loads(rest)  # enabled explicitly
    if kind == _PICKLED:
        raise UsageError("a pickled object came; expected allow_pickle=True on all ranks, or none.")
    raise UsageError(rest.decode())


def _gathered(mine: bytes, name: str, process_set: Any) -> Sequence[bytes]:
    number, _ = ranks_of(process_set)
    engine = process.engine()
    asked = engine.submit("allgather", name, [np.frombuffer(mine, np.uint8)], process_set=number)
    joined = engine.wait(asked)[0].tobytes()
    parts, start = [], 0
    for (rows,) in (asked.response or {})["rows"]:
        parts.append(joined[start : start + rows])
        start += rows
    return parts
