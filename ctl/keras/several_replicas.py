"""Checks of a compiled model before it trains on several replicas.

The checks call custom losses and metrics with random numbers: with a batch, and with its parts as replicas
do. If the results differ, training would differ from training on one device.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf
from ctl.distribute.keras_objects import is_keras3_variable, layers_of, unwrap
from ctl.errors import UsageError
from ctl.keras import part_values
from ctl.tensorflow_patches import keras_models
from ctl.tensorflow_patches.replaced_methods import recorded_calls

_log = logging.getLogger("ctl")
_OF_WHOLE_BATCH = ("dice", "tversky", "circle")  # losses of Keras


def check_for_strategy(model: Any, strategy: Any, jit_compile: bool) -> None:
    """Raises UsageError for a model that cannot train under `strategy`."""
    replicas = strategy.num_replicas_in_sync
    if keras_models.strategy_of_model(model, strategy) is not strategy:
        raise UsageError(
            "the model was made outside the strategy's scope. Make and compile it under `with "
            "strategy.scope():`, or give a function that makes it."
        )
    names = [name for name in _names_of_losses(model) if name in _OF_WHOLE_BATCH]
    if names:
        raise UsageError(
            f"the loss {names[0]} compares the examples of a batch, and each of {replicas} replicas "
            "has a part of it only. Train on one device, or use a loss per example."
        )
    rows = {t.shape[0] for t in getattr(model, "inputs", None) or () if t.shape[0] is not None}
    if rows:
        raise UsageError(
            f"the model was made for batches of {min(rows)} rows (batch_shape=), and each of {replicas} "
            "replicas gets a part of a batch. Leave the batch size out of keras.Input, or train on one "
            "device."
        )
    if jit_compile:
        raise UsageError(
            f"the model has jit_compile=True, but XLA cannot compute means over {replicas} replicas inside "
            "a compiled step. Compile the model with jit_compile=False, or train on one device."
        )


def check_scope_of_compile(model: Any, strategy: Any) -> None:
    """Raises UsageError if the optimizer or the metrics of a model belong to another strategy."""
    owners = [owner for owner in (keras_models.loss_tracker(model), model.optimizer) if owner is not None]
    in_scope = strategy.extended.variable_created_in_scope
    if not all(in_scope(unwrap(variable)) for owner in owners for variable in owner.variables):
        raise UsageError(
            "the model was compiled outside the strategy's scope; expected an optimizer and metrics with "
            "the variables of the strategy. Call model.compile under `with strategy.scope():`."
        )


def _names_of_losses(model: Any) -> list[str]:
    """Returns the names of the compiled losses, in lower case, except losses that Keras does not define."""
    names = []
    for loss in tf.nest.flatten(model.loss):
        owner = loss if inspect.isfunction(loss) else type(loss)
        if isinstance(loss, str):
            names.append(loss.lower())
        elif owner.__module__.startswith("keras."):
            names.append(owner.__name__.lower())
    return names


def check_losses_and_metrics(model: Any, x: Any, y: Any, replicas: int) -> None:
    """Raises UsageError for losses and metrics that replicas would compute differently from one device.

    Args:
      model: Compiled model with its variables.
      x: Inputs of a batch. Only shapes and dtypes are used.
      y: Targets of a batch. Only shapes and dtypes are used.
      replicas: Number of replicas.

    Losses and metrics that cannot be called with random numbers are not checked.
    """
    losses, metrics = losses_of_user(model), metrics_of_user(model)
    if not losses and not metrics:
        return
    calls: list[tuple[Any, tuple]] = []
    with contextlib.suppress(Exception):  # the model may not accept random inputs
        for inputs, targets in part_values.random_structures((x, y)):
            outputs = part_values.call_model(model, inputs, training=False)
            calls += _recorded_calls(model, targets, outputs, losses, metrics)
    for instance, (targets, *outputs) in calls:
        for variant in _values_of(part_values.variants, targets):
            if instance in losses:
                _check_loss(instance, variant, *outputs, replicas=replicas)
            else:
                check_metric(instance, (variant, *outputs), replicas)


def _values_of(function: Callable, *arguments: Any) -> list[Any]:
    """Returns the values that a generator function yields, up to its end or its first exception."""
    values: list[Any] = []
    with contextlib.suppress(Exception):
        values.extend(function(*arguments))
    return values


def _recorded_calls(
    model: Any, targets: Any, outputs: Any, losses: Collection[Any], metrics: Collection[Any]
) -> list[tuple[Any, tuple]]:
    """Returns the losses and metrics with the arguments that Keras passes to them."""
    from keras import StatelessScope

    with (
        StatelessScope(),
        recorded_calls(losses, "call") as calls_of_losses,
        recorded_calls(metrics, "update_state") as calls_of_metrics,
    ):
        if losses:
            with contextlib.suppress(Exception):
                keras_models.compiled_loss(model)(targets, outputs)
        if metrics:
            with contextlib.suppress(Exception):
                keras_models.compiled_metrics(model).update_state(targets, outputs)
    return [*calls_of_losses, *calls_of_metrics]


def _check_loss(loss: Any, targets: Any, outputs: Any, *, replicas: int) -> None:
    try:
        is_mean = part_values.compare_losses(loss, targets, outputs)
    except Exception:  # random numbers may be invalid arguments
        return
    if is_mean is False:
        name = getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__)
        raise UsageError(
            f"the loss {name} would have other values on {replicas} replicas than on one device: it is not "
            f"a mean over the examples of a batch, here targets {tuple(targets.shape)} and outputs "
            f"{tuple(outputs.shape)}, and each replica has a part of the batch. Return one number per "
            "example (shape [batch]), or train on one device. To train with the mean of the losses of the "
            'replicas, write a train_step and give own_step="mean".'
        )


def check_metric(metric: Any, arguments: Sequence[Any], replicas: int) -> None:
    """Raises UsageError if replicas would compute a metric differently from one device.

    Logs a warning if only batches with unequal numbers of rows per replica give different results.

    Args:
      metric: Keras metric.
      arguments: Random arguments of `update_state`, each `[part_values.NUM_ROWS, ...]`.
      replicas: Number of replicas.
    """
    try:
        has_equal_halves = part_values.compare_metrics(metric, arguments, part_values.HALVES)
        has_equal_parts = part_values.compare_metrics(metric, arguments, part_values.UNEQUAL)
    except Exception:  # random numbers may be invalid arguments
        return
    if has_equal_halves is False:
        raise UsageError(
            f"the metric {metric.name!r} would have other values on {replicas} replicas than on one "
            "device: the variables of a metric are summed over replicas. Return one number per example "
            "(shape [batch]) from its function, write a keras.metrics.Metric whose variables are sums "
            "over examples, or train on one device."
        )
    if has_equal_parts is False:
        _log.warning(
            "The metric %r counts batches, not examples. If %d replicas cannot split the last batch "
            "evenly, its value differs from that of one device.",
            metric.name,
            replicas,
        )


def check_recorded_metrics(calls: Collection[tuple[Any, tuple]], rows: int, replicas: int) -> None:
    """Checks metrics that a custom step updates with tensors of one row per example.

    Args:
      calls: Metrics with the arguments of `update_state` in a trace.
      rows: Number of rows of a replica's batch in the trace.
      replicas: Number of replicas.
    """
    for metric, arguments in calls:
        shapes = [getattr(argument, "shape", tf.TensorShape([])) for argument in arguments]
        if arguments and all(shape.rank and shape[0] == rows for shape in shapes):
            structures = part_values.random_structures(tuple(arguments))
            for values in _values_of(lambda structures=structures: structures):
                check_metric(metric, values, replicas)


def check_added_losses(model: Any, x: Any, replicas: int) -> frozenset[str]:
    """Returns the names of the layers that add losses and passed the test for means over the examples.

    Args:
      model: Compiled model with its variables.
      x: Example inputs. Only shapes and dtypes are used.
      replicas: Number of replicas.

    Raises UsageError if such a loss is not a mean.
    """
    layers = layers_of(model)
    if not any(map(_may_add_losses, layers)) or any(_has_statistics(layer) for layer in layers):
        return frozenset()
    results: dict[str, bool] = {}
    with contextlib.suppress(Exception):  # the model may not accept random inputs
        for inputs in part_values.random_structures(x):
            for name, is_mean in part_values.compare_added_losses(model, inputs).items():
                results[name] = results.get(name, True) and is_mean
    names = ", ".join(repr(name) for name, is_mean in results.items() if not is_mean)
    if names:
        raise UsageError(
            f"the loss that the layer {names} adds would have other values on {replicas} replicas than on "
            "one device: it is not a mean over the examples of a batch, and each replica has a part of the "
            "batch. Divide a sum by the number of examples, or train on one device."
        )
    return frozenset(results)


def _may_add_losses(layer: Any) -> bool:
    """Returns True if a layer regularizes its activity, or its class calls `add_loss`."""
    if getattr(layer, "activity_regularizer", None) is not None:
        return True
    classes = [cls for cls in type(layer).__mro__ if not cls.__module__.startswith("keras.")]
    functions = [f for cls in classes for f in vars(cls).values() if inspect.isfunction(f)]
    return any("add_loss" in function.__code__.co_names for function in functions)


def _has_statistics(layer: Any) -> bool:
    """Returns True for a trainable BatchNormalization layer."""
    return hasattr(layer, "moving_mean") and layer.trainable


def losses_of_user(model: Any) -> list[Any]:
    """Returns the compiled loss objects that Keras does not define."""
    losses = keras_models.compiled_loss_objects(model)
    return [
        loss
        for loss in losses
        if not _is_of_keras(loss, getattr(loss, "fn", None)) and not part_values.has_tf_variables(loss)
    ]


def metrics_of_user(model: Any) -> list[Any]:
    """Returns the metrics that Keras does not define, if all their variables are Keras sums."""
    compiled = keras_models.compiled_metrics(model)
    metrics = [*(m for m in model.metrics if m is not compiled), *getattr(compiled, "metrics", [])]
    return [
        metric
        for metric in metrics
        if not _is_of_keras(metric, keras_models.metric_function(metric))
        and not part_values.has_tf_variables(metric)
        and all(is_keras3_variable(v) and v.aggregation == "sum" for v in metric.variables)
    ]


def _is_of_keras(instance: Any, wrapped: Any) -> bool:
    """Returns True if Keras defines the class of an object and, if it wraps a function, that function."""
    modules = [type(instance).__module__]
    if wrapped is not None:
        modules.append(getattr(wrapped, "__module__", None) or "")
    return all(module.startswith("keras.") for module in modules)
