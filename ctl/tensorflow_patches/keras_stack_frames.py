"""Modules, functions and local variables of Keras in call stacks.

Purpose: The code that assigns a variable decides if a step may assign it. An optimizer assigns equal values
  on all replicas; a BatchNormalization layer assigns statistics of one replica.
Uses: names of modules of `keras.src` and `tf_keras.src`, and the locals `self` and `mask` of
  `BatchNormalization.call`.
Versions: Keras 3.0 and later, tf_keras 2.16 and later.
Upstream issue: none known.
Switch: none, as these are reads; the checks belong to `mirrored_assignments`.
"""

import sys
from typing import Any

TRUSTED_MODULES = tuple(
    f"{package}.src.{module}"
    for package in ("keras", "tf_keras")
    for module in ("random", "layers.normalization", "layers.regularization", "optimizers")
)
VARIABLE_MODULES = ("keras.src.backend.common.variables", "keras.src.backend.tensorflow")
NORMALIZATION_MODULE = "keras.src.layers.normalization.batch_normalization"
MERGING_MODULE = "keras.src.layers.merging"


def is_called_by(modules: tuple[str, ...], function: str = "") -> bool:
    """Returns True if a frame of the stack is in one of `modules`, in a function with that prefix."""
    return _calling_frame(modules, function) is not None


def normalization_call() -> tuple[Any, bool] | None:
    """Returns the running BatchNormalization layer, and True if it has a mask; None without a layer."""
    frame = _calling_frame((NORMALIZATION_MODULE,), "call")
    layer = None if frame is None else frame.f_locals.get("self")
    if frame is None or layer is None:
        return None
    return layer, frame.f_locals.get("mask") is not None


def _calling_frame(modules: tuple[str, ...], function: str) -> Any:
    """Returns the innermost frame in one of `modules` and in a function with that prefix, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if name.startswith(modules) and code.co_name.startswith(function):
            return frame
        frame = frame.f_back  # type: ignore[assignment]
    return None
