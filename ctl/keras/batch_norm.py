"""Synchronized batch normalization.

By default Keras 3 computes mean and variance over the examples of each replica separately, so training on
several replicas differs from training on one device. `synchronized=True` computes them over all replicas.
"""

from typing import Any

from ctl.distribute.keras_objects import is_keras3, layers_of
from ctl.errors import UsageError


def synchronize_batch_norm(model: Any) -> int:
    """Sets `synchronized` on every BatchNormalization layer of a Keras 3 model and returns their number.

    Call it before the model is traced: in `build`, or before `ctl.fit`. Layers of nested models, such as
    those of `keras.applications`, are included. Weights, names and saved files do not change. Raises
    UsageError if `model` is not a Keras 3 model or layer.

    >>> self.model = keras.applications.MobileNetV2(weights=None)
    >>> ctl.synchronize_batch_norm(self.model)
    """
    if not is_keras3(model) or not layers_of(model):
        raise UsageError(f"model is a {type(model).__name__}; expected a Keras 3 model or layer.")
    layers = [layer for layer in layers_of(model) if type(layer).__name__ == "BatchNormalization"]
    for layer in layers:
        layer.synchronized = True
    return len(layers)
