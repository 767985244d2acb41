"""Overrides of `fit`, `evaluate` or `predict` in the class of a model, such as a task of KerasHub.

`ctl.fit(model, ...)` calls the override, as `model.fit(...)` does. Where the override calls the method of
`keras.Model`, `ctl` executes that call:

    class WithPreprocessing(keras.Model):
        def fit(self, x, y=None, batch_size=32, **options):
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
            return super().fit(data.map(self.preprocess), **options)  # executed by ctl.fit
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from ctl.distribute.keras_objects import is_keras3
from ctl.errors import UsageError
from ctl.keras.own_steps import has_own
from ctl.tensorflow_patches.replaced_methods import replaced_in_base_class

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ADVICE = {
    "fit": "Call model.fit for that loop, or write it as a train_step or as a ctl.Trainer.",
    "evaluate": "Call model.evaluate, or write the evaluation as a test_step.",
    "predict": "Call model.predict, or write the prediction as a predict_step.",
}


class ValidationArguments(NamedTuple):
    """Validation data of `ctl.fit`, its batch size for arrays, and its number of batches (None: all)."""

    data: Any
    batch_size: int | None
    steps: int | None


def through_override(function: _Function) -> _Function:
    """Decorates `ctl.fit`, `ctl.evaluate` or `ctl.predict` to call an override of the model."""
    signature, verb = inspect.signature(function), function.__name__
    options = {n for n, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

    @functools.wraps(function)
    def call(model: Any, *arguments: Any, **named: Any) -> Any:
        if not is_keras3(model) or not has_own(model, verb):
            return function(model, *arguments, **named)
        _check_calls_base(model, verb)
        keras_arguments = dict(signature.bind(model, *arguments, **named).arguments)
        del keras_arguments["model"]
        ctl_options = {name: keras_arguments.pop(name) for name in options & keras_arguments.keys()}
        if verb == "evaluate" and "return_dict" in _accepted(model, verb, ["return_dict"]):
            keras_arguments.setdefault("return_dict", True)
        calls = 0

        def base_method(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and (ctl_options.get("model_dir") or ctl_options.get("checkpoints")):
                raise UsageError(
                    f"{_name(model, verb)} calls keras.Model.fit several times, and one directory cannot "
                    "hold the checkpoints of several trainings. Leave model_dir and checkpoints out."
                )
            if verb == "evaluate":
                named.setdefault("return_dict", len(arguments) > 7 and arguments[7])
                arguments = arguments[:7]
            return function(model, *arguments, **named, **ctl_options)

        with replaced_in_base_class(model, verb, base_method):
            result = _call_override(model, verb, keras_arguments)
        if not calls:
            raise UsageError(_not_supported(model, verb))
        return result

    return call  # type: ignore[return-value]


def prepare_validation(model: Any, validation: ValidationArguments) -> ValidationArguments:
    """Returns the validation data as an override of `evaluate` passes them to `keras.Model.evaluate`.

    Keras calls `model.evaluate` in each evaluation of a training. `ctl.fit` calls an override once, before
    the training. Raises UsageError if the override computes its result from the result of Keras.
    """
    if validation.data is None or not has_own(model, "evaluate"):
        return validation
    _check_calls_base(model, "evaluate")
    is_tuple = isinstance(validation.data, (tuple, list))
    x, y, sample_weight = (*(validation.data if is_tuple else [validation.data]), None, None)[:3]
    result: dict[str, float] = {}
    prepared: list[ValidationArguments] = []

    def base_method(
        x: Any = None, y: Any = None, batch_size: int | None = None, verbose: Any = "auto",
        sample_weight: Any = None, steps: int | None = None, callbacks: Any = None,
        return_dict: bool = False, _use_cached_eval_dataset: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        if _use_cached_eval_dataset:  # Keras then ignores the other arguments
            prepared.append(validation)
        else:
            data = x if y is None and sample_weight is None else (x, y, sample_weight)
            prepared.append(ValidationArguments(data, batch_size, steps))
        return result

    arguments = {
        "x": x, "y": y, "sample_weight": sample_weight, "batch_size": validation.batch_size,
        "steps": validation.steps, "callbacks": None, "return_dict": True,
        "_use_cached_eval_dataset": True,
    }  # fmt: skip
    accepted = _accepted(model, "evaluate", arguments)
    with replaced_in_base_class(model, "evaluate", base_method):
        try:
            returned = _call_override(model, "evaluate", {name: arguments[name] for name in accepted})
        except (KeyError, IndexError, TypeError, ValueError):
            if not prepared:
                raise
            returned = None  # the override reads a metric of the empty result
    if len(prepared) != 1 or returned is not result:
        raise UsageError(
            f"{_name(model, 'evaluate')} computes its result from the result of keras.Model.evaluate; "
            "expected an override that only prepares the data, because ctl.fit evaluates within its own "
            "loop. Write the computation as a test_step or a metric, or leave the validation data out and "
            "call ctl.evaluate."
        )
    return prepared[0]


def _call_override(model: Any, verb: str, arguments: dict[str, Any]) -> Any:
    """Calls the override. Passes inputs and targets by position if their parameters have other names."""
    override = getattr(type(model), verb)
    parameters = inspect.signature(override).parameters
    has_positional = any(p.kind is not inspect.Parameter.VAR_KEYWORD for p in list(parameters.values())[1:])
    names = [n for n in ("x", "y") if has_positional and n in arguments and n not in parameters]
    positional = [arguments.pop(name) for name in names]
    try:
        inspect.signature(override).bind(model, *positional, **arguments)
    except TypeError as e:
        raise UsageError(
            f"{_name(model, verb)} does not accept these arguments: {e}. Its signature is "
            f"{verb}{inspect.signature(override)}."
        ) from e
    return override(model, *positional, **arguments)


def _accepted(model: Any, verb: str, names: Any) -> list[str]:
    """Returns the names of the arguments that the override accepts by keyword."""
    parameters = inspect.signature(getattr(type(model), verb)).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return list(names)
    return [name for name in names if name in parameters]


def _check_calls_base(model: Any, verb: str) -> None:
    """Raises UsageError if no function of the model's classes calls the method of `keras.Model`."""
    classes = [c for c in type(model).__mro__ if not c.__module__.startswith(("keras.", "builtins"))]
    functions = [inspect.unwrap(f) for c in classes for f in vars(c).values() if inspect.isfunction(f)]
    owners = {"super", *(c.__name__ for c in type(model).__mro__)}
    for code in (code for function in functions for code in _codes_of(function.__code__)):
        if verb in code.co_names and owners & {*code.co_names, *code.co_freevars}:
            return
    raise UsageError(_not_supported(model, verb))


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function and of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


def _not_supported(model: Any, verb: str) -> str:
    return (
        f"{_name(model, verb)} does not call keras.Model.{verb}, so ctl.{verb} would not execute any part "
        f"of it; expected an override that calls super().{verb}(...). {_ADVICE[verb]}"
    )


def _name(model: Any, verb: str) -> str:
    return f"{type(model).__name__}.{verb}"
