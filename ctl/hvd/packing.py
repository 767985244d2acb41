"""Python objects as bytes and back: JSON for what it can say, raw buffers for arrays.

No pickle, whose reader runs what the bytes say. Types are kept: tuples, sets, bytes, complex numbers,
keys that are no strings, NumPy arrays and scalars, eager tensors.
"""

import base64
import json
from typing import Any

import numpy as np
from ctl.errors import UsageError
from ctl.hvd.engine.arithmetic import dtype_named

_PLAIN = (str, bool, type(None))
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def packed(thing: Any) -> bytes:
    """Raises UsageError that names the part that cannot be packed."""
    return json.dumps(_said(thing, "the object"), separators=(",", ":")).encode()


def unpacked(data: bytes) -> Any:
    """What was packed."""
    return _meant(json.loads(data))


def _said(thing: Any, where: str) -> Any:
    if type(thing) in _PLAIN or type(thing) is int:
        return thing
    if type(thing) is float:
        return {"float": thing.hex()}
    if type(thing) is list:
        return [_said(part, f"{where}[{i}]") for i, part in enumerate(thing)]
    if type(thing) is dict:
        return {
            "dict": [
                [_said(key, f"a key of {where}"), _said(value, f"{where}[{key!r}]")]
                for key, value in thing.items()
            ]
        }
    for name, kind in _SEQUENCES.items():
        if type(thing) is kind:
            return {name: [_said(part, f"an element of {where}") for part in thing]}
    if isinstance(thing, (bytes, bytearray)):
        return {type(thing).__name__: base64.b64encode(thing).decode()}
    if type(thing) is complex:
        return {"complex": [thing.real.hex(), thing.imag.hex()]}
    return _said_array(thing, where)


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
    value = said[kind]
    if kind == "float":
        return float.fromhex(value)
    if kind == "dict":
        return {_meant(key): _meant(part) for key, part in value}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_meant(part) for part in value)
    if kind == "complex":
        return complex(*map(float.fromhex, value))
    data = base64.b64decode(value)
    if kind in ("bytes", "bytearray"):
        return data if kind == "bytes" else bytearray(data)
    return _meant_array(kind, data, said)


def _meant_array(kind: str, data: bytes, said: dict) -> Any:
    array = np.frombuffer(bytearray(data), dtype_named(said["dtype"])).reshape(said["shape"])
    if kind == "scalar":
        return array[()]
    if kind == "tensor":
        import tensorflow as tf

        return tf.constant(array)
    return array
