"""Private attributes and methods of Keras 3 models, layers and callbacks.

Purpose: `ctl.fit` trains a compiled model with the step of `ctl`. Keras exports neither the compiled losses
  and metrics nor the creation of variables from an example batch.
Uses: `_compile_loss`, `_compile_metrics`, `_compile_config`, `_loss_tracker`, `_compute_loss`,
  `_symbolic_build`, `_call_has_training_arg`, `_flatten_metrics_in_order` and `_distribute_strategy` of
  models; `_flatten_layers` and `_losses` of layers; `_flat_losses` and `_user_metrics` of compiled losses
  and metrics; `_fn` of metrics; `_is_default` of methods of callbacks; `_start_batch` and `_stop_batch` of
  the callback `TensorBoard`.
Versions: Keras 3.0 and later.
Upstream issue: none known.
Switch: none, as these are reads and calls.
"""

from typing import Any


def compiled_loss(model: Any) -> Any:
    """Returns the function of the compiled losses, or None."""
    return model._compile_loss


def compiled_loss_objects(model: Any) -> list[Any]:
    """Returns the loss objects of the compiled losses."""
    entries = getattr(compiled_loss(model), "_flat_losses", None) or ()
    return [getattr(entry, "loss", entry) for entry in entries]


def compiled_metrics(model: Any) -> Any:
    """Returns the metric that contains the compiled metrics, or None."""
    return model._compile_metrics


def compiled_metrics_of_user(model: Any) -> Any:
    """Returns the argument `metrics` of `Model.compile`, or None."""
    return getattr(compiled_metrics(model), "_user_metrics", None)


def metric_function(metric: Any) -> Any:
    """Returns the function that a metric wraps, or None."""
    return getattr(metric, "_fn", None)


def compile_argument(model: Any, name: str) -> Any:
    """Returns an argument of `Model.compile` as it was passed; the objects need not be serializable."""
    compile_config = getattr(model, "_compile_config", None)
    return getattr(compile_config, "config", {}).get(name)


def loss_tracker(model: Any) -> Any:
    """Returns the metric of the loss."""
    return model._loss_tracker


def compute_loss(model: Any, x: Any, y: Any, predicted: Any, weight: Any, training: bool) -> Any:
    """Returns the loss that `Model.train_step` computes on one device."""
    return model._compute_loss(x, y, predicted, weight, training=training)


def build_symbolically(model: Any, data: Any) -> None:
    """Creates all variables of a model, its metrics and its optimizer. A no-op for a built model."""
    model._symbolic_build(data_batch=data)


def has_training_argument(model: Any) -> bool:
    """Returns True if the call of a model has the argument `training`."""
    return bool(model._call_has_training_arg)


def results_in_order(model: Any, results: dict[str, Any]) -> Any:
    """Returns results of metrics as a list, in the order of `Model.evaluate`."""
    return model._flatten_metrics_in_order(results)


def strategy_of_model(model: Any, default: Any) -> Any:
    """Returns the strategy that was active when a model was created, or `default`."""
    return getattr(model, "_distribute_strategy", default)


def has_added_losses(layer: Any) -> bool:
    """Returns True if a layer has called `add_loss`."""
    return bool(getattr(layer, "_losses", None))


def is_default(method: Any) -> bool:
    """Returns True for a method that a callback inherits from `keras.callbacks.Callback`."""
    return bool(getattr(method, "_is_default", False))


def profiled_batches(tensorboard: Any) -> tuple[int, int]:
    """Returns the first and the last batch that a `keras.callbacks.TensorBoard` profiles, 0 for none."""
    return getattr(tensorboard, "_start_batch", 0), getattr(tensorboard, "_stop_batch", 0)


def flattened_layers(model: Any) -> list[Any]:
    """Returns a model or layer and all layers within it; an empty list for other objects."""
    flatten = getattr(model, "_flatten_layers", None)
    return list(flatten()) if callable(flatten) else []
