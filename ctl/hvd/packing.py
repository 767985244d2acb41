"""Serialization of Python objects: JSON for its types, raw buffers for arrays.

Pickle is not used, because unpickling can execute code. Types are preserved: tuples, sets, bytes, complex
numbers, keys other than strings, NumPy arrays and scalars, eager tensors.
"""

import base64
import json
from argparse import Namespace
from collections import OrderedDict
from typing import Any

import numpy as np
from ctl.collectives.arithmetic import to_numpy_dtype
from ctl.errors import UsageError


def packed_arrays(thing: Any) -> bytes:
    """Returns the serialized object. Raises UsageError that names the part that cannot be serialized."""
    return json.dumps(_said(thing, "the object"), separators=(",", ":")).encode()


def unpacked(data: bytes) -> Any:
    """Returns the deserialized object."""
    return _meant(json.loads(data))


def _said(thing: Any, where: str) -> Any:
    say = _SAY.get(type(thing))
    return _said_array(thing, where) if say is None else say(thing, where)


def _said_list(thing: Any, where: str) -> list[Any]:
    return [_said(part, f"{where}[{i}]") for i, part in enumerate(thing)]


def _said_dict(thing: dict, where: str) -> dict[str, Any]:
    return {
        "dict": [
            [_said(key, f"a key of {where}"), _said(value, f"{where}[{key!r}]")]
            for key, value in thing.items()
        ]
    }


def _said_group(thing: Any, where: str) -> dict[str, Any]:
    return {type(thing).__name__: [_said(part, f"an element of {where}") for part in thing]}


def _said_bytes(thing: Any, _: str) -> dict[str, Any]:
    return {type(thing).__name__: base64.b64encode(thing).decode()}


_SAY: dict[type, Any] = {
    **dict.fromkeys((str, bool, type(None), int), lambda thing, _: thing),
    **dict.fromkeys((tuple, set, frozenset), _said_group),
    **dict.fromkeys((bytes, bytearray), _said_bytes),
    list: _said_list,
    OrderedDict: lambda thing, where: {"OrderedDict": _said_dict(thing, where)["dict"]},
    Namespace: lambda thing, where: {"Namespace": _said_dict(dict(vars(thing)), where)["dict"]},
    range: lambda thing, _: {"range": [thing.start, thing.stop, thing.step]},
    dict: _said_dict,
    float: lambda thing, _: {"float": thing.hex()},
    complex: lambda thing, _: {"complex": [thing.real.hex(), thing.imag.hex()]},
}


def _said_array(thing: Any, where: str) -> Any:
    kind = "tensor" if hasattr(thing, "numpy") and not isinstance(thing, np.generic) else "array"
    array = thing.numpy() if kind == "tensor" else thing
    if not isinstance(array, (np.ndarray, np.generic)) or np.asarray(array).dtype.kind == "O":
        raise UsageError(
            f"{where} is a {type(thing).__module__}.{type(thing).__qualname__}, which does not travel "
            "between ranks; expected None, numbers, strings, bytes, lists, tuples, sets, dicts, NumPy "
            "arrays and tensors of these. Send its fields instead, or pass allow_pickle=True if you "
            "trust every rank."
        )
    if isinstance(array, np.generic):
        kind = "scalar"
    data = np.asarray(array)
    return {
        kind: base64.b64encode(np.ascontiguousarray(data).tobytes()).decode(),
        "dtype": data.dtype.str if data.dtype.kind in "USM" else data.dtype.name,
        "shape": list(data.shape),
    }


def _meant(said: Any) -> Any:
    if isinstance(said, list):
        return [_meant(part) for part in said]
    if not isinstance(said, dict):
        return said
    kind = next(iter(said))
    if kind in _MEAN:
        return _MEAN[kind](said[kind])
    return _meant_array(kind, base64.b64decode(said[kind]), said)


def _parts(value: list) -> list[Any]:
    return [_meant(part) for part in value]


_MEAN: dict[str, Any] = {
    "float": float.fromhex,
    "complex": lambda value: complex(*map(float.fromhex, value)),
    "dict": lambda value: {_meant(key): _meant(part) for key, part in value},
    "OrderedDict": lambda value: OrderedDict((_meant(key), _meant(part)) for key, part in value),
    "Namespace": lambda value: Namespace(**_MEAN["dict"](value)),
    "range": lambda value: range(*value),
    "tuple": lambda value: tuple(_parts(value)),
    "set": lambda value: set(_parts(value)),
    "frozenset": lambda value: frozenset(_parts(value)),
    "bytes": base64.b64decode,
    "bytearray": lambda value: bytearray(base64.b64decode(value)),
}


def _meant_array(kind: str, data: bytes, said: dict) -> Any:
    array = np.frombuffer(bytearray(data), to_numpy_dtype(said["dtype"])).reshape(said["shape"])
    if kind == "scalar":
        return array[()]
    if kind == "tensor":
        import tensorflow as tf

        return tf.constant(array)
    return array
