"""Which objects are of Keras 3, the TensorFlow variable within a Keras 3 one, and what an object has."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import keras_models


def is_keras3(thing: Any) -> bool:
    """True for objects of Keras 3 (as opposed to tf_keras, tf.Module or a user's own classes)."""
    return any(c.__module__ == "keras" or c.__module__.startswith("keras.") for c in type(thing).__mro__)


def is_keras3_variable(thing: Any) -> bool:
    """True for a variable of Keras 3 that stands on a `tf.Variable`."""
    return is_keras3(thing) and isinstance(getattr(thing, "value", None), tf.Variable)


def attribute(thing: Any, name: str) -> Any:
    """An attribute of an object of anybody's, or None; a variable has none.

    TensorFlow looks for a variable's in its value, which it may add up over all workers for that.
    """
    return None if isinstance(thing, tf.Variable) else getattr(thing, name, None)


def layers_of(model: Any) -> list[Any]:
    """A Keras model or layer with all layers within it; [] for anything else."""
    return [] if isinstance(model, tf.Variable) else keras_models.flattened_layers(model)


def synchronized_layer(layers: Iterable[Any]) -> Any:
    """Returns the first trainable layer that sums over replicas within a step, or None."""
    for layer in layers:
        is_synchronized = getattr(layer, "synchronized", False) or "Sync" in type(layer).__name__
        if is_synchronized and layer.trainable:
            return layer
    return None


def plain(variable: Any) -> tf.Variable:
    """The `tf.Variable` within a Keras 3 variable, or the variable itself."""
    return variable.value if is_keras3_variable(variable) else variable
