"""Serialization of Python objects to JSON, with Base64 for bytes and arrays.

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


def serialize_object(value: Any) -> bytes:
    """Serializes an object. Raises UsageError that names the part that cannot be serialized."""
    return json.dumps(_encode(value, "the object"), separators=(",", ":")).encode()


def deserialize_object(data: bytes) -> Any:
    """Deserializes an object of `serialize_object`."""
    return _decode(json.loads(data))


def _encode(value: Any, where: str) -> Any:
    encode = _ENCODERS.get(type(value))
    return _encode_array(value, where) if encode is None else encode(value, where)


def _encode_list(values: Any, where: str) -> list[Any]:
    return [_encode(part, f"{where}[{i}]") for i, part in enumerate(values)]


def _encode_dict(dictionary: dict, where: str) -> dict[str, Any]:
    return {
        "dict": [
            [_encode(key, f"a key of {where}"), _encode(value, f"{where}[{key!r}]")]
            for key, value in dictionary.items()
        ]
    }


def _encode_group(group: Any, where: str) -> dict[str, Any]:
    return {type(group).__name__: [_encode(part, f"an element of {where}") for part in group]}


def _encode_bytes(data: Any, _: str) -> dict[str, Any]:
    return {type(data).__name__: base64.b64encode(data).decode()}


_ENCODERS: dict[type, Any] = {
    **dict.fromkeys((str, bool, type(None), int), lambda value, _: value),
    **dict.fromkeys((tuple, set, frozenset), _encode_group),
    **dict.fromkeys((bytes, bytearray), _encode_bytes),
    list: _encode_list,
    OrderedDict: lambda value, where: {"OrderedDict": _encode_dict(value, where)["dict"]},
    Namespace: lambda value, where: {"Namespace": _encode_dict(dict(vars(value)), where)["dict"]},
    range: lambda value, _: {"range": [value.start, value.stop, value.step]},
    dict: _encode_dict,
    float: lambda value, _: {"float": value.hex()},
    complex: lambda value, _: {"complex": [value.real.hex(), value.imag.hex()]},
}


def _encode_array(value: Any, where: str) -> Any:
    type_name = "tensor" if hasattr(value, "numpy") and not isinstance(value, np.generic) else "array"
    array = value.numpy() if type_name == "tensor" else value
    if not isinstance(array, (np.ndarray, np.generic)) or np.asarray(array).dtype.kind == "O":
        raise UsageError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent "
            "between ranks; expected None, numbers, strings, bytes, lists, tuples, sets, dicts, NumPy "
            "arrays and tensors of these. Send its fields instead, or pass allow_pickle=True if you "
            "trust every rank."
        )
    if isinstance(array, np.generic):
        type_name = "scalar"
    data = np.asarray(array)
    return {
        type_name: base64.b64encode(np.ascontiguousarray(data).tobytes()).decode(),
        "dtype": data.dtype.str if data.dtype.kind in "USM" else data.dtype.name,
        "shape": list(data.shape),
    }


def _decode(encoded: Any) -> Any:
    if isinstance(encoded, list):
        return [_decode(part) for part in encoded]
    if not isinstance(encoded, dict):
        return encoded
    type_name = next(iter(encoded))
    if type_name in _DECODERS:
        return _DECODERS[type_name](encoded[type_name])
    return _decode_array(type_name, base64.b64decode(encoded[type_name]), encoded)


def _decode_parts(value: list) -> list[Any]:
    return [_decode(part) for part in value]


_DECODERS: dict[str, Any] = {
    "float": float.fromhex,
    "complex": lambda value: complex(*map(float.fromhex, value)),
    "dict": lambda value: {_decode(key): _decode(part) for key, part in value},
    "OrderedDict": lambda value: OrderedDict((_decode(key), _decode(part)) for key, part in value),
    "Namespace": lambda value: Namespace(**_DECODERS["dict"](value)),
    "range": lambda value: range(*value),
    "tuple": lambda value: tuple(_decode_parts(value)),
    "set": lambda value: set(_decode_parts(value)),
    "frozenset": lambda value: frozenset(_decode_parts(value)),
    "bytes": base64.b64decode,
    "bytearray": lambda value: bytearray(base64.b64decode(value)),
}


def _decode_array(type_name: str, data: bytes, encoded: dict) -> Any:
    array = np.frombuffer(bytearray(data), to_numpy_dtype(encoded["dtype"])).reshape(encoded["shape"])
    if type_name == "scalar":
        return array[()]
    if type_name == "tensor":
        import tensorflow as tf

        return tf.constant(array)
    return array
