"""Connection of the workers without blocking the other threads of this process.

    with unlocked_connection.unlocked(), signals.default_action():
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

Purpose: TensorFlow waits for the peers with Python's interpreter lock held, so no other thread runs, for
  example that of the heartbeat. The function of its C API, called through ctypes, waits without the lock.
Replaces: `TFE_EnableCollectiveOps` in `tensorflow.python.pywrap_tfe`, within a block.
Versions: TensorFlow 2.16 and later, with the library `libtensorflow_cc.so.2`; otherwise a no-op.
Upstream issue: none known.
Switch: `unlocked_connection`. Without the patch other threads stop until all workers are connected.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import switches


@contextlib.contextmanager
def unlocked() -> Iterator[bool]:
    """Within the block TensorFlow waits for peers without the lock.

    Yields False if the function cannot be replaced.
    """
    if not switches.is_enabled("unlocked_connection"):
        yield False
        return
    try:
        from tensorflow.python import pywrap_tfe

        connect = _connect_function()
        original = pywrap_tfe.TFE_EnableCollectiveOps
    except (ImportError, OSError, AttributeError):
        yield False
        return
    pywrap_tfe.TFE_EnableCollectiveOps = connect
    try:
        yield True
    finally:
        pywrap_tfe.TFE_EnableCollectiveOps = original


def _connect_function() -> Any:
    """Returns `connect(context, serialized ServerDef)`, which raises the errors of the original."""
    library = ctypes.CDLL(str(Path(tf.__file__).parent / "libtensorflow_cc.so.2"))
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t

    def declared(name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
        return function

    enable = declared("TFE_EnableCollectiveOps", None, pointer, text, number, pointer)
    new_status = declared("TF_NewStatus", pointer)
    code_of = declared("TF_GetCode", ctypes.c_int, pointer)
    message_of = declared("TF_Message", text, pointer)
    delete_status = declared("TF_DeleteStatus", None, pointer)
    capsule_name = ctypes.pythonapi.PyCapsule_GetName
    capsule_name.restype, capsule_name.argtypes = text, [ctypes.py_object]
    capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    capsule_pointer.restype, capsule_pointer.argtypes = pointer, [ctypes.py_object, text]

    def connect(context: Any, server: bytes) -> None:
        address = capsule_pointer(context, capsule_name(context))
        status = new_status()
        try:
            enable(address, server, len(server), status)
            code, message = code_of(status), message_of(status).decode(errors="replace")
        finally:
            delete_status(status)
        if code:
            raise tf.compat.v1.errors.exception_type_from_error_code(code)(None, None, message)

    return connect
