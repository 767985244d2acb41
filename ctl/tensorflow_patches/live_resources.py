"""Objects of TensorFlow that must stay alive until the process has ended.

Purpose: At the end of a process, the destructors of iterators and of the context can wait for a minute.
Uses: `tensorflow.python.framework.ops.EagerTensor`, `tensorflow.python.framework.dtypes.resource` and
  `tensorflow.python.eager.context._context`, if they are imported.
Versions: TensorFlow 2.16 and later. An object that does not exist is skipped.
Upstream issue: none known.
Switch: none, as these are reads.
"""

import gc
import sys
from typing import Any

_CONTEXT_MODULE = "tensorflow.python.eager.context"


def is_context_imported() -> bool:
    """Returns True if TensorFlow's module of the context is imported."""
    return _CONTEXT_MODULE in sys.modules


def loaded_context() -> Any:
    """Returns the context of this process, or None."""
    return getattr(sys.modules.get(_CONTEXT_MODULE), "_context", None)


def resource_handles() -> list[Any]:
    """Returns all handles of TensorFlow's resources, such as those of iterators.

    The last handle of a resource destroys it. It may be in a module, a frame or a distributed iterator.
    """
    tensor_class = getattr(sys.modules.get("tensorflow.python.framework.ops"), "EagerTensor", None)
    tensor_classes = (tensor_class,) if isinstance(tensor_class, type) else ()
    resource = getattr(sys.modules.get("tensorflow.python.framework.dtypes"), "resource", None)
    gc.unfreeze()  # get_objects does not return frozen objects
    return [v for v in gc.get_objects() if type(v) in tensor_classes and v.dtype == resource]
