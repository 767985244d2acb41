"""First search for devices, without TensorFlow's messages about missing GPUs.

Purpose: On a machine without a GPU, TensorFlow writes several lines to stderr at the first search.
Replaces: `ensure_initialized` and `_initialize_physical_devices` of
  `tensorflow.python.eager.context.Context`, each until its first call.
Versions: TensorFlow 2.16 and later; a method that does not exist is skipped.
Upstream issue: https://github.com/tensorflow/tensorflow/issues/66750
Switch: `quiet_device_search`. Without the patch the messages appear.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ctl.tensorflow_patches import switches

METHODS = ("ensure_initialized", "_initialize_physical_devices")


def quiet_device_search(quiet: Callable[[], AbstractContextManager[Any]]) -> None:
    """Makes the first call of each method run within `quiet()`. A no-op before TensorFlow is imported."""
    context_class = getattr(sys.modules.get("tensorflow.python.eager.context"), "Context", None)
    if context_class is not None and switches.is_enabled("quiet_device_search"):
        for method in METHODS:
            _quiet_first_call(context_class, method, quiet)


def _quiet_first_call(
    context_class: type, method: str, quiet: Callable[[], AbstractContextManager[Any]]
) -> None:
    original = getattr(context_class, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def first_call(self: Any, *arguments: Any, **options: Any) -> Any:
        setattr(context_class, method, original)
        with quiet():
            return original(self, *arguments, **options)

    setattr(context_class, method, first_call)
