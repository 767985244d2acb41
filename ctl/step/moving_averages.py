"""Exponential moving averages of weights: in their place while a model is evaluated or exported.

Training goes on with the raw weights, to the last bit. The averages are the optimizer's (`use_ema=True`),
so they are in its checkpoints.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf
from ctl.distribute.keras_objects import attribute, is_keras3, plain
from ctl.errors import UsageError


def averages_of(optimizer: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(variable, its moving average) of an optimizer of Keras 3 or tf_keras; none before its first step.

    `variables` may be more than those that it updates.
    """
    optimizer = attribute(optimizer, "inner_optimizer") or optimizer  # of one that scales the loss
    averages = attribute(optimizer, "_model_variables_moving_average")
    if not attribute(optimizer, "use_ema") or not averages:
        return []
    if int(plain(optimizer.iterations).numpy()) == 0:
        return []
    if is_keras3(optimizer):
        pairs = zip(optimizer._trainable_variables, averages, strict=True)
        return [(variable, average) for variable, average in pairs if average is not None]
    places = optimizer._index_dict
    keys = [(v, optimizer._var_key(v)) for v in variables if hasattr(v, "_unique_id")]
    return [(v, averages[places[key]]) for v, key in keys if key in places]


def averages_among(attributes: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Those of every optimizer among a trainer's attributes."""
    models = [m for m in attributes.values() if isinstance(m, tf.Module)]
    variables = list({id(v): v for m in models for v in m.variables}.values())
    return [pair for thing in attributes.values() for pair in averages_of(thing, variables)]


class HasWeights(Protocol):
    """A trainer."""

    evaluate_ema: bool

    def moving_averages(self) -> Iterable[tuple[Any, Any]] | None: ...


def pairs_of(trainer: HasWeights) -> list[tuple[Any, Any]]:
    """(variable, its average) of all that a trainer evaluates with, as TensorFlow's variables.

    They are those of its optimizers, or what its optional method moving_averages() returns. Raises
    UsageError for what is not a pair of variables of one shape.
    """
    if not trainer.evaluate_ema:
        return []
    pairs = trainer.moving_averages()
    return [_checked(pair) for pair in (averages_among(vars(trainer)) if pairs is None else pairs)]


@contextlib.contextmanager
def in_place(trainer: HasWeights) -> Iterator[None]:
    """Within the block variables have the values of their averages; afterwards their own, bit for bit.

    Raises UsageError as `pairs_of`.
    """
    found = pairs_of(trainer)
    raw = [tf.identity(variable) for variable, _ in found]
    try:
        for variable, average in found:
            variable.assign(tf.cast(average, variable.dtype))
        yield
    finally:
        for (variable, _), value in zip(found, raw, strict=True):
            variable.assign(value)


def _checked(pair: Any) -> tuple[Any, Any]:
    good = isinstance(pair, tuple | list) and len(pair) == 2 and all(hasattr(v, "shape") for v in pair)
    if not good or not tf.TensorShape(pair[0].shape).is_compatible_with(pair[1].shape):
        raise UsageError(
            f"moving_averages() has {_named(pair)}; expected pairs (variable, its average) of one shape: "
            "[(v, self.ema.average(v)) for v in self.model.trainable_variables]."
        )
    return plain(pair[0]), plain(pair[1])


def _named(thing: Any) -> str:
    if isinstance(thing, tuple | list):
        return f"({', '.join(map(_named, thing))})"
    return f"{type(thing).__name__} {getattr(thing, 'shape', '')}".rstrip()
