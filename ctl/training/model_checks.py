"""Checks of the models that `build` made, before anything is traced."""

from typing import Any

from ctl.distribute.keras_objects import is_keras3, layers_of
from ctl.errors import UsageError
from ctl.tensorflow_patches.keras_stack_frames import MERGING_MODULE
from ctl.training.task import Task


def check_built(task: Task) -> None:
    """Raises UsageError for a layer of a Keras 3 model that creates its variables only in a step.

    The optimizer is built before the first step, for the variables that exist by then.
    """
    if not is_keras3(task.optimizer):
        return
    for name, owned in task.owners.items():
        for model in owned if isinstance(owned, (list, tuple)) else [owned]:
            layer = _unbuilt_layer(model)
            if layer is not None:
                raise UsageError(
                    f"self.{name}: the {type(layer).__name__} layer {layer.name!r} has no variables yet, "
                    "as its input shape is unknown. In build(), begin the model with keras.Input(shape), "
                    f"or call self.{name}.build(shape), e.g. self.{name}.build((None, 28, 28)), or call "
                    "the model once on zeros."
                )


def _unbuilt_layer(model: Any) -> Any:
    """Returns the first layer without variables that will create some when it is called, or None."""
    if not is_keras3(model) or getattr(model, "built", True):
        return None
    layers = [layer for layer in layers_of(model) if not layer.built and _creates_variables(layer)]
    return next((layer for layer in layers if not layers_of(layer)[1:]), None) or next(iter(layers), None)


def _creates_variables(layer: Any) -> bool:
    """Returns True if the class of the layer, rather than the base class, has a method `build`."""
    bases = type(layer).__mro__
    owner = next((base for base in bases if "build" in vars(base)), None)
    is_base = owner is None or owner.__name__ in ("Layer", "Model", "Functional", "Operation")
    module = "" if owner is None else owner.__module__
    return not (is_base and module.startswith("keras.")) and not module.startswith(MERGING_MODULE)
