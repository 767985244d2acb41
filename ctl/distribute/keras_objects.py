"""Helpers for objects of Keras 3 and other Keras versions."""

import traceback
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from ctl.tensorflow_patches import keras_models


def is_keras3(value: Any) -> bool:
    """Returns True for objects of Keras 3 (not of tf_keras, tf.Module or a user's own classes)."""
    return any(c.__module__ == "keras" or c.__module__.startswith("keras.") for c in type(value).__mro__)


def is_keras3_variable(variable: Any) -> bool:
    """Returns True for a variable of Keras 3 that wraps a `tf.Variable`."""
    return is_keras3(variable) and isinstance(getattr(variable, "value", None), tf.Variable)


def attribute(value: Any, name: str) -> Any:
    """Returns an attribute of an object, or None. The result is None for every variable.

    TensorFlow would read an attribute of a variable from its value, which may need a sum over all workers.
    """
    return None if isinstance(value, tf.Variable) else getattr(value, name, None)


def layers_of(model: Any) -> list[Any]:
    """Returns a Keras model or layer and all layers within it; [] for any other object."""
    return [] if isinstance(model, tf.Variable) else keras_models.flattened_layers(model)


def synchronized_layer(layers: Iterable[Any]) -> Any:
    """Returns the first trainable layer that sums over replicas within a step, or None."""
    for layer in layers:
        is_synchronized = getattr(layer, "synchronized", False) or "Sync" in type(layer).__name__
        if is_synchronized and layer.trainable:
            return layer
    return None


def unwrap(variable: Any) -> tf.Variable:
    """Returns the `tf.Variable` within a Keras 3 variable, or the variable itself."""
    return variable.value if is_keras3_variable(variable) else variable


def failed_callback(error: BaseException) -> str | None:
    """Returns the method of a Keras callback that raised an error, such as "EarlyStopping.on_epoch_end".

    None: the traceback of the error contains no such method.
    """
    method = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, name = frame.f_locals.get("self"), frame.f_code.co_name
        if not name.startswith("on_") or not _is_keras_callback(owner):
            continue
        if type(owner).__name__ != "CallbackList":
            return f"{type(owner).__name__}.{name}"
        method = f"{name} of a Keras callback"  # unless a later frame has the callback
    return method


def _is_keras_callback(value: Any) -> bool:
    return is_keras3(value) and any(c.__name__ == "Callback" for c in type(value).__mro__)
