"""Private attributes of optimizers of Keras 3 and tf_keras.

Purpose: Optimizers have no public access to their variables, the variable of their learning rate, their
  moving averages, their momentums, and the strategy of their scope.
Uses: `_trainable_variables`, `_iterations`, `_learning_rate`, `_hyper`, `_momentums`, `_built`,
  `_model_variables_moving_average`, `_get_variable_index`, `_index_dict`, `_var_key`,
  `_distribution_strategy` and `_create_all_weights` of optimizers; `_unique_id` of variables.
Versions: Keras 3.0 and later, tf_keras 2.16 and later with its legacy optimizers.
Upstream issue: none known.
Switch: none, as these are reads and calls.
"""

from collections.abc import Sequence
from typing import Any


def trainable_variables(optimizer: Any, default: Any = ()) -> Any:
    """Returns the variables that a Keras 3 optimizer is built for, or `default`."""
    return getattr(optimizer, "_trainable_variables", default)


def count_step(optimizer: Any) -> None:
    """Adds 1 to the iterations of a Keras 3 optimizer without an update."""
    optimizer._iterations.assign_add(1)


def learning_rate_variable(optimizer: Any, default: Any = None) -> Any:
    """Returns the variable, number or schedule of the learning rate, or `default`."""
    return getattr(optimizer, "_learning_rate", default)


def legacy_learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate of a legacy optimizer of tf_keras, else as `learning_rate_variable`."""
    hyper = getattr(optimizer, "_hyper", {})
    return hyper.get("learning_rate", learning_rate_variable(optimizer))


def momentums(optimizer: Any) -> Any:
    """Returns the momentum variables of an optimizer, or None."""
    return getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)


def is_built(optimizer: Any) -> bool:
    """Returns True if the variables of an optimizer exist."""
    return bool(getattr(optimizer, "built", False) or getattr(optimizer, "_built", False))


def is_legacy(optimizer: Any) -> bool:
    """Returns True for optimizers of `tf_keras.optimizers.legacy`, which have no method `build`."""
    return hasattr(optimizer, "_create_all_weights")


def build_legacy(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the variables of a legacy optimizer of tf_keras."""
    optimizer._create_all_weights(variables)


def strategy_of_optimizer(optimizer: Any) -> Any:
    """Returns the strategy that was active when an optimizer was created, or None."""
    return getattr(optimizer, "_distribution_strategy", None)


def keras3_averages(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Returns the moving averages of variables of a Keras 3 optimizer."""
    return [optimizer._model_variables_moving_average[optimizer._get_variable_index(v)] for v in variables]


def moving_averages(optimizer: Any) -> Any:
    """Returns the moving averages of all variables of an optimizer, or None."""
    return getattr(optimizer, "_model_variables_moving_average", None)


def average_pairs(optimizer: Any, variables: Sequence[Any], *, is_keras3: bool) -> list[tuple[Any, Any]]:
    """Returns pairs (variable, moving average).

    Args:
      optimizer: Optimizer of Keras 3 or tf_keras with moving averages.
      variables: Variables that an optimizer of tf_keras may update.
      is_keras3: True for an optimizer of Keras 3.
    """
    averages = moving_averages(optimizer)
    if is_keras3:
        pairs = zip(optimizer._trainable_variables, averages, strict=True)
        return [(variable, average) for variable, average in pairs if average is not None]
    index_by_key = optimizer._index_dict
    keys = [(v, optimizer._var_key(v)) for v in variables if hasattr(v, "_unique_id")]
    return [(v, averages[index_by_key[key]]) for v, key in keys if key in index_by_key]
