"""Checks of the model that a function of ctl receives."""

from typing import Any

from ctl.distribute.keras_objects import is_keras3
from ctl.errors import UsageError
from ctl.keras.own_steps import has_own


def check_is_model(model: Any) -> None:
    """Raises UsageError unless `model` is a Keras 3 model, compiled or not."""
    if is_keras3(model) and hasattr(model, "predict_step"):
        return
    received = f"a {type(model).__name__}"
    if isinstance(model, type):
        received = f"the class {model.__name__}"
    elif model is None or isinstance(model, str):
        received = repr(model)
    hint = ""
    if type(model).__module__.startswith("tf_keras"):
        received = f"a {type(model).__module__}.{type(model).__name__}"
        hint = " tf_keras models train with their own model.fit, also on several workers."
    raise UsageError(f"model is {received}; expected a Keras 3 model.{hint}")


def check_model(model: Any, *, trains: bool = True) -> None:
    """Raises UsageError unless `model` is a compiled Keras 3 model, with an optimizer if it `trains`."""
    check_is_model(model)
    if not getattr(model, "compiled", False):
        raise UsageError(
            "the model is not compiled. Call model.compile(optimizer=..., loss=...) first, inside the "
            "strategy's scope."
        )
    if trains and model.optimizer is None and not has_own(model, "train_step"):
        raise UsageError("the model was compiled without an optimizer; give compile(optimizer=...).")
