"""Precision of layers that `build` creates: `--precision` and `Trainer(precision=...)`."""

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ctl.checkpoints.tracked_state import is_optimizer
from ctl.distribute.keras_objects import is_keras3
from ctl.errors import UsageError
from ctl.step import optimizers
from ctl.tensorflow_patches import optimizer_attributes

_UNCHANGED, _SCALED = "auto", "mixed_float16"
_log = logging.getLogger("ctl")


@contextlib.contextmanager
def default_policy(precision: str) -> Iterator[None]:
    """Sets the default dtype policy of Keras 3 and tf_keras within a block that builds models.

    A policy that the block sets itself is left alone, with a note in the log.

    Args:
      precision: Name of the policy. "auto" leaves the policy of the program.
    """
    with contextlib.ExitStack() as stack:
        for get_policy, set_policy in [] if precision == _UNCHANGED else _policy_functions():
            stack.enter_context(_temporary_policy(precision, get_policy, set_policy))
        yield


def scaled_optimizers(attributes: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Returns a LossScaleOptimizer for each optimizer without one, by the name of its attribute.

    Args:
      attributes: Attributes of the trainer.
      precision: Name of the policy. Only the gradients of "mixed_float16" need a scale.

    Raises:
      UsageError: If an optimizer is not of Keras 3 or tf_keras, or is in a list or dictionary.
    """
    wrapped: dict[int, Any] = {}
    replacements: dict[str, Any] = {}
    for name, value in attributes.items() if precision == _SCALED else ():
        items = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        )
        if any(is_optimizer(item) and not optimizers.scales_loss(item) for item in items):
            raise UsageError(
                f"precision is {_SCALED!r} and self.{name} contains an optimizer without a loss scale. "
                "Write keras.optimizers.LossScaleOptimizer(optimizer) in build()."
            )
        if is_optimizer(value) and not optimizers.scales_loss(value):
            if id(value) not in wrapped:
                wrapped[id(value)] = _with_loss_scale(name, value)
            replacements[name] = wrapped[id(value)]
    return replacements


def log_models_with_own_policy(models: Mapping[str, Any], precision: str) -> None:
    """Logs the models with another policy than `precision`, which they set themselves."""
    names = {n: getattr(getattr(m, "dtype_policy", None), "name", "no policy") for n, m in models.items()}
    other_policies = [f"self.{n} has {name}" for n, name in names.items() if name != precision]
    if other_policies and precision != _UNCHANGED:
        message = "precision=%s applies to the layers without a policy of their own: %s."
        _log.warning(message, precision, ", ".join(other_policies))


def _policy_functions() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Returns the functions that return and set the default policy, for each Keras version in use."""
    keras = importlib.import_module("keras")
    functions = [(keras.config.dtype_policy, keras.config.set_dtype_policy)]
    if "tf_keras" in sys.modules or os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        module = importlib.import_module("tf_keras").mixed_precision
        functions.append((module.global_policy, module.set_global_policy))
    return functions


@contextlib.contextmanager
def _temporary_policy(
    precision: str, get_policy: Callable[[], Any], set_policy: Callable[[Any], None]
) -> Iterator[None]:
    previous_policy = get_policy()
    set_policy(precision)
    try:
        yield
    finally:
        name = get_policy().name
        if name == precision:
            set_policy(previous_policy)
        else:
            _log.warning("build() sets the dtype policy %s, which replaces precision=%s.", name, precision)


def _with_loss_scale(name: str, optimizer: Any) -> Any:
    modules = {c.__module__.partition(".")[0] for c in type(optimizer).__mro__}
    if is_keras3(optimizer):
        scaled = importlib.import_module("keras").optimizers.LossScaleOptimizer(optimizer)
        if optimizer.built:
            scaled.build(optimizer_attributes.trainable_variables(optimizer))
        return scaled
    if "tf_keras" in modules:
        return importlib.import_module("tf_keras").mixed_precision.LossScaleOptimizer(optimizer)
    raise UsageError(
        f"precision is {_SCALED!r} and self.{name} is a {type(optimizer).__name__}; expected an optimizer "
        "of Keras, whose loss can be scaled. Train with precision='mixed_bfloat16', which needs no scale."
    )
