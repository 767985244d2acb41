"""Precision of layers that `build` creates: `--precision` and `Trainer(precision=...)`."""

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ctl.distribute.keras_objects import is_keras3
from ctl.errors import UsageError
from ctl.step import optimizers

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


def scaled_optimizers(optimizer_by_name: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Returns a LossScaleOptimizer for each optimizer without one, by the name of its attribute.

    Args:
      optimizer_by_name: Optimizers of the trainer.
      precision: Name of the policy. Only the gradients of "mixed_float16" need a scale.

    Raises:
      UsageError: If an optimizer is not of Keras 3 or tf_keras.
    """
    if precision != _SCALED:
        return {}
    return {
        name: _with_loss_scale(name, optimizer)
        for name, optimizer in optimizer_by_name.items()
        if not optimizers.scales_loss(optimizer)
    }


def log_exceptions(models: Mapping[str, Any], precision: str) -> None:
    """Logs the models whose policy is not `precision`, because they set their own."""
    policies = {name: getattr(model, "dtype_policy", None) for name, model in models.items()}
    exceptions = [f"self.{n} has {p.name}" for n, p in policies.items() if p and p.name != precision]
    if exceptions and precision != _UNCHANGED:
        message = "precision=%s applies to the layers without a policy of their own: %s."
        _log.info(message, precision, ", ".join(exceptions))


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
            _log.info("build() sets the dtype policy %s, which replaces precision=%s.", name, precision)


def _with_loss_scale(name: str, optimizer: Any) -> Any:
    modules = {c.__module__.partition(".")[0] for c in type(optimizer).__mro__}
    if is_keras3(optimizer):
        return importlib.import_module("keras").optimizers.LossScaleOptimizer(optimizer)
    if "tf_keras" in modules:
        return importlib.import_module("tf_keras").mixed_precision.LossScaleOptimizer(optimizer)
    raise UsageError(
        f"precision is {_SCALED!r} and self.{name} is a {type(optimizer).__name__}; expected an optimizer "
        "of Keras, whose loss can be scaled. Train with precision='mixed_bfloat16', which needs no scale."
    )
