"""Checks of the model and the other arguments of `ctl.fit`, `ctl.evaluate` and `ctl.predict`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ctl.distribute.keras_objects import is_keras3
from ctl.errors import UsageError
from ctl.keras.own_steps import has_own
from ctl.setting_values import check_integer, check_type, is_checked

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MINIMUM = {
    "batch_size": 1, "steps": 1, "epochs": 0, "initial_epoch": 0, "steps_per_epoch": 1,
    "validation_steps": 1, "validation_batch_size": 1, "save_every_steps": 0,
}  # fmt: skip


def with_checked_arguments(function: _Function) -> _Function:
    """Decorates a function of a model: values of wrong types raise UsageError, and numbers become int."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **named)
        except TypeError:  # which the call raises with the name of the function
            return function(*arguments, **named)
        check_is_model(bound.arguments["model"])
        for name, value in bound.arguments.items():
            bound.arguments[name] = _checked(signature.parameters[name], value)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def _checked(parameter: inspect.Parameter, value: Any) -> Any:
    name = parameter.name
    if name in _MINIMUM and not (value is None and parameter.default is None):
        return check_integer(name, value, _MINIMUM[name])
    if name == "verbose":
        _check_verbose(value)
    elif name == "shuffle" and isinstance(value, str):
        if value != "batch":
            raise UsageError(f'shuffle is {value!r}; expected True, False or "batch".')
    elif name == "shuffle":
        check_type(name, value, bool)
    elif is_checked(parameter.annotation):
        check_type(name, value, parameter.annotation)
    return value


def _check_verbose(verbose: Any) -> None:
    if verbose not in ("auto", 0, 1, 2):
        raise UsageError(f'verbose is {verbose!r}; expected "auto", 0 (nothing), 1 (a bar) or 2 (lines).')


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
