"""Plain TensorFlow variables in Keras 3 metrics, for central storage.

Purpose: Keras adds to a variable by reading and assigning it. Central storage sums the assigned values of
  the replicas, so old values would count once for each replica (measured: a loss of 1.23 instead of 1.28).
Replaces: `_value` of variables of Keras 3 by a `ResourceVariable` of
  `tensorflow.python.ops.resource_variable_ops`, which no strategy wraps.
Versions: TensorFlow 2.16 and later, Keras 3.0 and later.
Upstream issue: none known.
Switch: `metric_values`. Without the patch metrics have wrong results under central storage.
"""

from typing import Any

from ctl.tensorflow_patches import switches


def replace_value(variable: Any) -> None:
    """Replaces the value of a Keras 3 variable by a variable that no strategy manages."""
    from tensorflow.python.ops import resource_variable_ops

    if switches.is_enabled("metric_values"):
        variable._value = resource_variable_ops.ResourceVariable(
            variable.value.numpy(), trainable=False, name=variable.name
        )
