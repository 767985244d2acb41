"""A batch that is taken off an open source, to be given again: once, or without end.

taken = take(batches, agreement.sum)
without_end(batches, taken, strategy)      # the same batch, again and again
once(batches, taken, strategy)             # what the source would have given next
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.batches import Batches


def take(batches: Batches, summed: Callable[[list[float]], np.ndarray]) -> Any:
    """The next element of the iterator; None, on all workers, where one of them has no other.

    Args:
      summed: adds a vector up over workers.
    """
    if not batches.ends_unknown:
        return next(batches.iterator)
    found = batches.iterator.get_next_as_optional()
    has_one = bool(found.has_value())
    missing = summed([0.0 if has_one else 1.0])[0]
    return None if missing else found.get_value()


def once(batches: Batches, element: Any, strategy: tf.distribute.Strategy) -> Batches:
    """`element` alone."""
    return dataclasses.replace(batches, iterator=_iterator(batches, element, strategy, count=1))


def without_end(batches: Batches, element: Any, strategy: tf.distribute.Strategy) -> Batches:
    """`element` without end."""
    iterator = _iterator(batches, element, strategy, count=None)
    return dataclasses.replace(batches, iterator=iterator, ends_unknown=False, passes=None)


def _iterator(batches: Batches, element: Any, strategy: tf.distribute.Strategy, count: int | None) -> Any:
    """Of the same kind and type as that of `batches`, so that what is traced for one takes the other."""
    spec = batches.iterator.element_spec
    if isinstance(batches.iterator, tf.data.Iterator):
        return iter(_dataset([element], [spec]).repeat(count))
    shares = strategy.experimental_local_results(element)
    specs = [tf.nest.map_structure(lambda s, i=i: _of_replica(s, i), spec) for i in range(len(shares))]
    dataset = _dataset(list(shares), specs).repeat(count)
    return iter(strategy.distribute_datasets_from_function(lambda _: dataset))


def _of_replica(spec: Any, index: int) -> Any:
    """The type of one replica's value, in that of the values of all."""
    of_each = getattr(spec, "_value_specs", None)
    return spec if of_each is None else of_each[index]


def _dataset(elements: list, specs: list) -> tf.data.Dataset:
    """One element after the other, each of its own type."""
    made = [_of_type(element, spec) for element, spec in zip(elements, specs, strict=True)]
    dataset = made[0]
    for other in made[1:]:
        dataset = dataset.concatenate(other)
    return dataset


def _of_type(element: Any, spec: Any) -> tf.data.Dataset:
    shapes = [s.shape for s in tf.nest.flatten(spec, expand_composites=True)]

    @tf.autograph.experimental.do_not_convert
    def typed(*parts: Any) -> Any:
        flat = [
            tf.raw_ops.PlaceholderWithDefault(input=part, shape=shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, flat, expand_composites=True)

    parts = tuple(tf.nest.flatten(element, expand_composites=True))
    return tf.data.Dataset.from_tensors(parts).map(typed)
