"""A batch that is taken off an open source, to be given again: once, or without end.

taken = take(batches, agreement.sum)
repeated(batches, taken, strategy)         # the same batch, again and again
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


def repeated(batches: Batches, element: Any, strategy: tf.distribute.Strategy) -> Batches:
    """`element` without end."""
    iterator = _iterator(batches, element, strategy, count=None)
    return dataclasses.replace(batches, iterator=iterator, ends_unknown=False, passes=None)


def _iterator(batches: Batches, element: Any, strategy: tf.distribute.Strategy, count: int | None) -> Any:
    """Of the same kind and type as that of `batches`, so that what is traced for one takes the other."""
    spec = batches.iterator.element_spec
    if isinstance(batches.iterator, tf.data.Iterator):
        return iter(_dataset([element], [spec]).repeat(count))
    shares = strategy.experimental_local_results(element)
    specs = getattr(spec, "_value_specs", [spec] * len(shares))
    dataset = _dataset(list(shares), list(specs)).repeat(count)
    return iter(strategy.distribute_datasets_from_function(lambda _: dataset))


def _dataset(elements: list, specs: list) -> tf.data.Dataset:
    """One element after the other, each of the first one's type."""

    def of_type(*parts: Any) -> Any:
        shapes = [s.shape for s in tf.nest.flatten(specs[0], expand_composites=True)]
        flat = [
            tf.raw_ops.PlaceholderWithDefault(input=part, shape=shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return tf.nest.pack_sequence_as(specs[0], flat, expand_composites=True)

    flat = [tuple(tf.nest.flatten(e, expand_composites=True)) for e in elements]
    one_by_one = [tf.data.Dataset.from_tensors(parts).map(of_type) for parts in flat]
    dataset = one_by_one[0]
    for other in one_by_one[1:]:
        dataset = dataset.concatenate(other)
    return dataset
