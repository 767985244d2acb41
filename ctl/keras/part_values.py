"""Comparison of losses and metrics of a batch with those of its parts, on random data.

A replica calls losses and metrics with its part of a batch. If the values of the parts do not combine to
the value of the batch, training on several replicas differs from training on one device.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.distribute.keras_objects import layers_of, unwrap
from ctl.step.keras_losses import GlobalMeans, undivided_means
from ctl.tensorflow_patches import keras_models
from ctl.tensorflow_patches.replaced_methods import replaced
from ctl.tensorflow_patches.weighted_means import weighted_means

NUM_ROWS = 8
HALVES = (slice(0, 4), slice(4, 8))
UNEQUAL = (slice(0, 5), slice(5, 8))
_SCALES = (1.0, 10.0)
_SENTINELS = (0, -1, 255, -100)  # values of targets that masked losses leave out
_seed_shifts = itertools.count(1)


class _MeansOfPart(GlobalMeans):
    """Shares of means over a batch of `NUM_ROWS` rows, for one part of the batch."""

    def everywhere(self, *counts: Any) -> list:
        return [count * (NUM_ROWS / self._rows) for count in counts]


def random_structures(structure: Any) -> Iterator[Any]:
    """Yields a structure of random tensors of `NUM_ROWS` rows for each magnitude in `_SCALES`.

    Floats are positive for the first magnitude, and integers are 0 or 1. Both are distributed unequally
    over the rows. Strings are empty.
    """
    for scale in _SCALES:
        make = functools.partial(_random_like, scale=scale, generator=np.random.default_rng(0))
        yield tf.nest.map_structure(make, structure)


def _random_like(part: Any, *, scale: float, generator: np.random.Generator) -> tf.Tensor:
    dtype, shape = tf.as_dtype(part.dtype), [NUM_ROWS, *part.shape[1:]]
    if dtype == tf.string:
        return tf.zeros(shape, dtype)
    numbers = generator.uniform(0.05, 0.95, shape)
    if not dtype.is_floating:
        rows = np.arange(NUM_ROWS).reshape([-1, *[1] * (len(shape) - 1)])
        limits = np.where(rows < UNEQUAL[0].stop, 0.8, 0.2)
        whole_numbers = numbers > limits if len(shape) > 1 else np.isin(rows, (2, 5, 6, 7))
        return tf.cast(whole_numbers, dtype)
    if scale != 1.0:
        numbers = scale * generator.normal(size=shape)
    numbers[HALVES[1]] *= 0.2
    return tf.cast(numbers, dtype)


def variants(targets: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields targets `[NUM_ROWS, ...]`, and variants with some rows of a value that losses may mask."""
    yield targets
    is_masked = np.isin(np.arange(NUM_ROWS), (0, 1, 6)).reshape([-1, *[1] * (len(targets.shape) - 1)])
    for value in _SENTINELS if targets.dtype.is_floating or targets.dtype.is_integer else ():
        if targets.dtype.min <= value <= targets.dtype.max:
            yield tf.where(is_masked, tf.cast(value, targets.dtype), targets)


def call_model(model: Any, inputs: Any, *, training: bool) -> Any:
    """Returns the outputs of a model. Each call uses new random numbers and changes no variable.

    Raises ValueError if layers have variables that Keras does not manage.
    """
    if any(has_tf_variables(layer) for layer in layers_of(model)):
        raise ValueError("a call may change variables")
    shift = next(_seed_shifts) * 1_000_003

    def value_of(variable: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(unwrap(variable))
        is_seed = variable.name == "seed_generator_state"
        return value + tf.cast(shift, value.dtype) if is_seed else value

    trainable = [value_of(v) for v in model.trainable_variables]
    other = [value_of(v) for v in model.non_trainable_variables]
    mode = {"training": training} if keras_models.has_training_argument(model) else {}
    outputs, _ = model.stateless_call(trainable, other, inputs, **mode)
    return outputs


def has_tf_variables(instance: Any) -> bool:
    """Returns True if an object has `tf.Variable` attributes, which Keras does not manage."""
    return any(
        isinstance(part, tf.Variable)
        for value in vars(instance).values()
        for part in (value if isinstance(value, (list, tuple)) else [value])
    )


def compare_losses(loss: Any, targets: Any, outputs: Any) -> bool | None:
    """Returns True if the loss of a batch is the sum of the shares of its parts, None if it is random.

    Args:
      loss: Keras loss object.
      targets: Targets of a batch, `[NUM_ROWS, ...]`.
      outputs: Outputs of the model for the batch, `[NUM_ROWS, ...]`.
    """

    def values() -> tuple[Any, Any]:
        with replaced([loss], "call", undivided_call):
            with undivided_means():
                of_batch = loss(targets, outputs)
            shares = []
            for part in UNEQUAL:
                with _MeansOfPart(part.stop - part.start, 1):
                    shares.append(loss(targets[part], outputs[part]))
        return of_batch, sum(shares)

    return _compare(values)


def undivided_call(_: Any, call: Callable) -> Callable:
    """Returns the `call` of a loss, in which nested loss objects return means over their arguments."""

    def call_undivided(*arguments: Any, **named: Any) -> Any:
        with undivided_means():
            return call(*arguments, **named)

    return call_undivided


def compare_metrics(metric: Any, arguments: Sequence[Any], parts: Sequence[slice]) -> bool | None:
    """Returns True if the result for a batch equals that of the summed variables of its parts.

    Args:
      metric: Keras metric.
      arguments: Arguments of `update_state`, each `[NUM_ROWS, ...]`.
      parts: Rows of each part.

    Returns None if the result is random.
    """

    def values() -> tuple[Any, Any]:
        start = metric.stateless_reset_state()
        of_batch = metric.stateless_update_state(start, *arguments)
        merged = [tf.convert_to_tensor(unwrap(value)) for value in start]
        for part in parts:
            with weighted_means((part.stop - part.start) / NUM_ROWS):
                updated = metric.stateless_update_state(start, *(argument[part] for argument in arguments))
            merged = [
                total + new - tf.convert_to_tensor(unwrap(old))
                for total, new, old in zip(merged, updated, start, strict=True)
            ]
        return _result(metric, of_batch), _result(metric, merged)

    return _compare(values)


def _result(metric: Any, values: list[Any]) -> Any:
    """Returns the result of a metric with these values of its variables."""
    from keras import StatelessScope

    with StatelessScope(state_mapping=list(zip(metric.variables, values, strict=True))):
        return tf.nest.map_structure(lambda part: tf.convert_to_tensor(unwrap(part)), metric.result())


def compare_added_losses(model: Any, inputs: Any) -> dict[str, bool]:
    """Returns a dictionary: layer name -> True if the loss that the layer adds is a mean over examples.

    Losses that are zero or random are omitted.
    """
    parts = [tf.nest.map_structure(lambda value, part=part: value[part], inputs) for part in UNEQUAL]
    of_batch, repeated = (_added_losses(model, inputs) for _ in range(2))
    first, second = (_added_losses(model, part) for part in parts)
    shares = [(part.stop - part.start) / NUM_ROWS for part in UNEQUAL]
    return {
        name: is_close(loss, shares[0] * first[name] + shares[1] * second[name])
        for name, loss in of_batch.items()
        if float(loss) != 0.0 and name in first and name in second and is_close(loss, repeated[name])
    }


def _added_losses(model: Any, inputs: Any) -> dict[str, Any]:
    """Returns a dictionary: layer name -> sum of the losses that the layer adds."""
    losses: dict[str, Any] = {}

    def recording(layer: Any, add_loss: Callable) -> Callable:
        def add_and_record(loss: Any) -> None:
            total = tf.reduce_sum(loss)
            losses[layer.name] = losses[layer.name] + total if layer.name in losses else total
            add_loss(loss)

        return add_and_record

    with replaced(layers_of(model), "add_loss", recording):
        call_model(model, inputs, training=True)
    return losses


def _compare(values: Callable[[], tuple[Any, Any]]) -> bool | None:
    of_batch, of_parts = values()
    if is_close(of_batch, of_parts):
        return True
    return False if is_close(of_batch, values()[0]) else None


def is_close(a: Any, b: Any) -> bool:
    """Returns True if two structures of numbers are equal within the precision of their types."""
    return all(map(_is_close, tf.nest.flatten(a), tf.nest.flatten(b)))


def _is_close(a: Any, b: Any) -> bool:
    tensor = tf.convert_to_tensor(a)
    tolerance = 5e-2 if tensor.dtype in (tf.float16, tf.bfloat16) else 1e-3
    first, second = (np.asarray(tf.cast(value, tf.float64)) for value in (tensor, b))
    return bool(np.allclose(first, second, rtol=tolerance, atol=1e-7, equal_nan=True))
