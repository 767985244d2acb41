"""Which objects are of Keras 3, and the TensorFlow variable within a Keras 3 one."""

from typing import Any

import tensorflow as tf


def is_keras3(thing: Any) -> bool:
    """True for objects of Keras 3 (as opposed to tf_keras, tf.Module or a user's own classes)."""
    return any(c.__module__ == "keras" or c.__module__.startswith("keras.") for c in type(thing).__mro__)


def is_keras3_variable(thing: Any) -> bool:
    """True for a variable of Keras 3 that stands on a `tf.Variable`."""
    return is_keras3(thing) and isinstance(getattr(thing, "value", None), tf.Variable)


def plain(variable: Any) -> tf.Variable:
    """The `tf.Variable` within a Keras 3 variable, or the variable itself."""
    return variable.value if is_keras3_variable(variable) else variable
