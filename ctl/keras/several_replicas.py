"""Checks of a compiled model before it trains on several replicas.

Losses and metrics of the user are called with random numbers: once with a batch, and with its two halves as
replicas call them. Where the results differ, training would differ from that on one device.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.keras_objects import layers_of, plain
from ctl.errors import UsageError
from ctl.keras.replaced_methods import replaced
from ctl.step.keras_losses import GlobalMeans, undivided_means

_OF_WHOLE_BATCH = ("dice", "tversky", "circle")  # losses of Keras
_ROWS = 8
_HALVES = (slice(0, _ROWS // 2), slice(_ROWS // 2, _ROWS))


def check_for_strategy(model: Any, strategy: Any, jit_compile: bool) -> None:
    """Raises UsageError for a model that cannot train under `strategy`."""
    replicas = strategy.num_replicas_in_sync
    if getattr(model, "_distribute_strategy", strategy) is not strategy:
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
            f"the model is to be compiled with jit_compile, and its means are taken over {replicas} "
            "replicas, which XLA cannot do. Compile it without, or train on one device."
        )


def _names_of_losses(model: Any) -> list[str]:
    """Returns the class names of the compiled losses, in lower case."""
    losses = tf.nest.flatten(model.loss)
    names = (
        loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__) for loss in losses
    )
    return [name.lower() for name in names]


def check_losses_and_metrics(model: Any, x: Any, y: Any, replicas: int) -> None:
    """Raises UsageError for losses and metrics that replicas would compute differently from one device.

    Args:
      model: a compiled model with its variables.
      x, y: an example batch, of which shapes and dtypes count; None for a model with its own `train_step`.
      replicas: number of replicas.

    Losses and metrics that cannot be called with random numbers are not checked.
    """
    losses, metrics = list(_losses_of_user(model)), list(_metrics_of_user(model))
    if not losses and not metrics:
        return
    pairs = [] if x is None else _pairs(model, x, y)
    for loss in losses:
        if any(_is_equal(_loss_by_parts(loss, *pair)) is False for pair in pairs):
            raise UsageError(
                f"the loss {_name(loss)} would have other values on {replicas} replicas than on one "
                "device: it is no mean over the examples of a batch, and each replica has a part of the "
                "batch. Return one number per example (shape [batch]), or train on one device. To train "
                "with the mean of the losses of the replicas, write a train_step and give "
                'own_step="mean".'
            )
    numbers = tf.linspace(0.1, 0.9, _ROWS)
    argument_lists = [*pairs, (numbers,), (numbers, numbers)]
    for metric in metrics:
        if any(_is_equal(_metric_by_parts(metric, *arguments)) is False for arguments in argument_lists):
            raise UsageError(
                f"the metric {metric.name!r} would have other values on {replicas} replicas than on one "
                "device: the variables of a metric are summed over replicas. Return one number per example "
                "(shape [batch]) from its function, write a keras.metrics.Metric whose variables are sums "
                "over examples, or train on one device."
            )


def _pairs(model: Any, x: Any, y: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns random targets and outputs for random inputs as pairs; [] if the model cannot be called."""
    inputs, targets = _random_structure((x, y))
    try:
        outputs = _outputs(model, inputs)
    except Exception:  # random inputs may have values that the model refuses
        return []
    return list(zip(tf.nest.flatten(targets), tf.nest.flatten(outputs), strict=False))


def check_added_losses(model: Any, x: Any, replicas: int) -> bool:
    """Returns True if all losses that layers add are known to be means over the examples of a batch.

    Args:
      model: a compiled model with its variables.
      x: example inputs, of which shapes and dtypes count.
      replicas: number of replicas.

    Raises UsageError if such a loss is no mean.
    """
    inputs = _random_structure(x)
    halves = [tf.nest.map_structure(lambda part, half=half: part[half], inputs) for half in _HALVES]

    def values() -> tuple[Any, Any]:
        of_batch, first, second = (_added_losses(model, part) for part in (inputs, *halves))
        return of_batch, {name: (loss + second[name]) / 2 for name, loss in first.items()}

    is_mean = _is_equal(values)
    if is_mean is False:
        losses, means = values()
        names = ", ".join(repr(name) for name in losses if not _is_close(losses[name], means[name]))
        raise UsageError(
            f"the loss that the layer {names} adds would have other values on {replicas} replicas than on "
            "one device: it is no mean over the examples of a batch, and each replica has a part of the "
            "batch. Divide a sum by the number of examples, or train on one device."
        )
    return bool(is_mean)


def _added_losses(model: Any, inputs: Any) -> dict[str, Any]:
    """Returns the sums of the losses that layers add, by the names of the layers."""
    losses: dict[str, Any] = {}

    def recording(layer: Any, add_loss: Callable) -> Callable:
        def add_and_record(loss: Any) -> None:
            losses[layer.name] = losses.get(layer.name, 0.0) + tf.reduce_sum(loss)
            add_loss(loss)

        return add_and_record

    with replaced(layers_of(model), "add_loss", recording):
        _outputs(model, inputs)
    return losses


def _random_structure(structure: Any) -> Any:
    generator = np.random.default_rng(0)
    return tf.nest.map_structure(lambda part: _random_like(part, generator), structure)


def _outputs(model: Any, inputs: Any) -> Any:
    """Returns the outputs of a model, with other random numbers in each call; no variable changes."""
    from keras import random

    shift = tf.cast(1e6 * random.uniform(()), tf.int64)  # also advances the global generator

    def value_of(variable: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(plain(variable))
        is_seed = variable.name == "seed_generator_state"
        return value + tf.cast(shift, value.dtype) if is_seed else value

    trainable = [value_of(v) for v in model.trainable_variables]
    other = [value_of(v) for v in model.non_trainable_variables]
    mode = {"training": False} if model._call_has_training_arg else {}
    outputs, _ = model.stateless_call(trainable, other, inputs, **mode)
    return outputs


def _losses_of_user(model: Any) -> Iterator[Any]:
    """Yields the compiled loss objects that are not those of Keras."""
    for entry in getattr(model._compile_loss, "_flat_losses", None) or ():
        loss = getattr(entry, "loss", entry)
        if not _is_of_keras(getattr(loss, "fn", loss)):
            yield loss


def _metrics_of_user(model: Any) -> Iterator[Any]:
    """Yields the metrics that are not those of Keras and have no other variables than those of Keras."""
    compiled = getattr(model._compile_metrics, "metrics", [])
    for metric in [*(m for m in model.metrics if m is not model._compile_metrics), *compiled]:
        is_of_user = not _is_of_keras(getattr(metric, "_fn", metric))
        is_plain = not any(isinstance(value, tf.Variable) for value in vars(metric).values())
        if is_of_user and is_plain and all(v.aggregation == "sum" for v in metric.variables):
            yield metric


def _is_of_keras(function_or_object: Any) -> bool:
    is_function = inspect.isfunction(function_or_object)
    owner = function_or_object if is_function else type(function_or_object)
    module = getattr(owner, "__module__", None) or ""
    return module.startswith("keras.")


def _name(loss: Any) -> str:
    return getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__)


def _random_like(part: Any, generator: np.random.Generator) -> tf.Tensor:
    """Returns numbers from 0 to 1 with the shape and dtype of a part, smaller ones in the second half.

    Whole numbers are 0 or 1, and texts are empty.
    """
    dtype, shape = tf.as_dtype(part.dtype), [_ROWS, *part.shape[1:]]
    if dtype == tf.string:
        return tf.zeros(shape, dtype)
    numbers = generator.uniform(0.05, 0.95, shape)
    if not dtype.is_floating:
        return tf.cast(np.round(numbers), dtype)
    numbers[_HALVES[1]] *= 0.2
    return tf.cast(numbers, dtype)


def _loss_by_parts(loss: Any, y: Any, predicted: Any) -> Callable[[], tuple[Any, Any]]:
    """Returns a function that returns the loss of a batch, and the sum of its shares on two replicas."""

    def values() -> tuple[Any, Any]:
        with undivided_means():
            of_batch = loss(y, predicted)
        shares = []
        for half in _HALVES:
            with GlobalMeans(_ROWS // 2, 2, local=True):
                shares.append(loss(y[half], predicted[half]))
        return of_batch, sum(shares)

    return values


def _metric_by_parts(metric: Any, *arguments: Any) -> Callable[[], tuple[Any, Any]]:
    """Returns a function that returns the result for a batch, and the one from two replicas."""

    def values() -> tuple[Any, Any]:
        start = metric.stateless_reset_state()
        of_batch = metric.stateless_update_state(start, *arguments)
        halves = [
            metric.stateless_update_state(start, *(part[half] for part in arguments)) for half in _HALVES
        ]
        merged = [a + b for a, b in zip(*halves, strict=True)]
        return _result(metric, of_batch), _result(metric, merged)

    return values


def _result(metric: Any, values: list[Any]) -> Any:
    """Returns the result of a metric with these values of its variables."""
    from keras import StatelessScope

    with StatelessScope(state_mapping=list(zip(metric.variables, values, strict=True))):
        return tf.nest.map_structure(lambda part: tf.convert_to_tensor(plain(part)), metric.result())


def _is_equal(values: Callable[[], tuple[Any, Any]]) -> bool | None:
    """Returns True if the two values are equal, and None if they are random or cannot be computed."""
    try:
        (batch_value, parts_value), (repeated_value, _) = values(), values()
    except Exception:  # not to be called with random numbers
        return None
    return _is_close(batch_value, parts_value) if _is_close(batch_value, repeated_value) else None


def _is_close(a: Any, b: Any) -> bool:
    pairs = zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    return all(np.allclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True) for x, y in pairs)
