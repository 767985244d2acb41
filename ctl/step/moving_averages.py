"""Exponential moving averages of weights, which replace the weights in evaluations and exports.

Training continues with the raw weights, bit for bit. The averages belong to the optimizer (`use_ema=True`),
so checkpoints contain them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.distribute.keras_objects import attribute, is_keras3, unwrap
from ctl.errors import UsageError
from ctl.tensorflow_patches import optimizer_attributes


def averages_of(optimizer: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns pairs (variable, moving average) of an optimizer; an empty list before its first step.

    Args:
      optimizer: Optimizer of Keras 3 or tf_keras.
      variables: Variables that it may update.
    """
    optimizer = attribute(optimizer, "inner_optimizer") or optimizer  # of one that scales the loss
    if not attribute(optimizer, "use_ema") or not optimizer_attributes.moving_averages(optimizer):
        return []
    if int(unwrap(optimizer.iterations).numpy()) == 0:
        return []
    return optimizer_attributes.average_pairs(optimizer, variables, is_keras3=is_keras3(optimizer))


def averages_among(attributes: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Returns pairs (variable, moving average) of all optimizers among attributes."""
    models = [m for m in attributes.values() if isinstance(m, tf.Module)]
    variables = list({id(v): v for m in models for v in m.variables}.values())
    return [pair for value in attributes.values() for pair in averages_of(value, variables)]


@dataclass(frozen=True)
class MovingAverages:
    """Moving averages with which a trainer evaluates.

    Attributes:
      attributes: Attributes of the trainer, some of which are optimizers.
      pairs_of_user: Returns pairs (variable, average), or None for the averages of the optimizers.
      enabled: False if the trainer evaluates with the raw weights.
    """

    attributes: Mapping[str, Any]
    pairs_of_user: Callable[[], Iterable[tuple[Any, Any]] | None]
    enabled: bool = True

    def pairs(self) -> list[tuple[Any, Any]]:
        """Returns pairs (variable, average) of TensorFlow variables.

        Raises:
          UsageError: If the user's pairs are anything else than pairs of variables of one shape.
        """
        if not self.enabled:
            return []
        averages = self.pairs_of_user()
        pairs = averages_among(self.attributes) if averages is None else averages
        return [_checked(pair) for pair in pairs]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, variables have the values of their averages; afterwards the raw values again.

        Raises:
          UsageError: As `pairs`.
        """
        pairs = self.pairs()
        raw_values = [tf.identity(variable) for variable, _ in pairs]
        try:
            for variable, average in pairs:
                variable.assign(tf.cast(average, variable.dtype))
            yield
        finally:
            for (variable, _), value in zip(pairs, raw_values, strict=True):
                variable.assign(value)


def _checked(pair: Any) -> tuple[Any, Any]:
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and all(hasattr(v, "shape") for v in pair)
    if not is_pair or not tf.TensorShape(pair[0].shape).is_compatible_with(pair[1].shape):
        raise UsageError(
            f"moving_averages() has {_named(pair)}; expected pairs (variable, its average) of one shape: "
            "[(v, self.ema.average(v)) for v in self.model.trainable_variables]."
        )
    return unwrap(pair[0]), unwrap(pair[1])


def _named(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_named, value))})"
    return f"{type(value).__name__} {getattr(value, 'shape', '')}".rstrip()
