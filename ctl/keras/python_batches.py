"""Conversion of `keras.utils.PyDataset` and Python generators to `tf.data.Dataset`.

Every worker reads the global batches, so the Python code must produce the same batches on every worker.
"""

import collections
import itertools
import weakref
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from ctl.errors import UsageError
from ctl.tensorflow_patches.dataset_attributes import pipeline_parts

_LOOKED_AT = 2  # number of batches to compare for axes of variable size, as in Keras
# first batches of datasets that can be read only once
_first_batches: weakref.WeakKeyDictionary[tf.data.Dataset, Any] = weakref.WeakKeyDictionary()


def is_py_dataset(value: Any) -> bool:
    """Returns True for a `keras.utils.PyDataset`."""
    return any(c.__name__ == "PyDataset" and c.__module__.startswith("keras.") for c in type(value).__mro__)


def is_generator(value: Any) -> bool:
    """Returns True for a Python generator."""
    return isinstance(value, Generator)


def training_batches(data: Any, *, epochs: int, steps: int, seed: int | None) -> tf.data.Dataset:
    """Returns `epochs` times `steps` batches of a PyDataset and calls its hooks as `Model.fit` does.

    A new pass over the PyDataset begins where the last one ended, also within an epoch. With a `seed`, each
    pass has another order of batches, the same on all workers and after a resume. None: no shuffling.
    """

    def batches() -> Iterator[Any]:
        passes = _passes(data, seed)
        data.on_epoch_end()  # also before the first epoch, as in Model.fit
        for _ in range(epochs):
            data.on_epoch_begin()
            yield from itertools.islice(passes, steps)
            data.on_epoch_end()

    return _dataset(batches, _first_of(data), tf.data.INFINITE_CARDINALITY)  # as for other repeated data


def validation_batches(data: Any, steps: int | None) -> tf.data.Dataset:
    """Returns one pass over a PyDataset in order, or at most its first `steps` batches.

    Raises UsageError for a PyDataset without a length if `steps` is None.
    """
    count = data.num_batches if steps is None else steps
    if count is None:
        raise UsageError(
            f"the validation data, a {type(data).__name__}, have no length; give validation_steps."
        )
    if steps is not None and data.num_batches is not None:
        count = min(steps, data.num_batches)

    def batches() -> Iterator[Any]:
        data.on_epoch_end()
        data.on_epoch_begin()
        yield from _read(data, range(count))
        data.on_epoch_end()

    return _dataset(batches, _first_of(data), count)


class Generated(NamedTuple):
    """Batches of a generator, and the largest number of rows of its first batches."""

    dataset: tf.data.Dataset
    rows: int


def generated_batches(generator: Any) -> Generated:
    """Returns the batches of a generator. A second iterator continues where the first one stopped."""
    first = list(itertools.islice(generator, _LOOKED_AT))
    if not first:
        raise UsageError("x is a generator that yields nothing; expected batches.")
    batches = itertools.chain(first, generator)
    standard_batches = [_standard(batch) for batch in first]
    dataset = _dataset(lambda: map(_standard, batches), standard_batches, None)
    _first_batches[dataset] = standard_batches[0]
    return Generated(dataset, _most_rows(standard_batches))


def example_batch(dataset: tf.data.Dataset) -> Any:
    """Returns the first batch of a dataset, or None if it is empty. Consumes no batch of a generator.

    Args:
      dataset: Dataset, or the batches of a generator after operations that keep batches (`take`, `repeat`).
    """
    for part in pipeline_parts(dataset):
        if part in _first_batches:
            return tf.nest.map_structure(tf.convert_to_tensor, _first_batches[part])
    return next(iter(dataset.take(1)), None)


def read_first(generator: Any, count: int) -> tf.data.Dataset:
    """Returns a dataset of the first `count` batches of a generator, which it reads into memory."""
    batches = [_standard(batch) for batch in itertools.islice(generator, count)]
    if not batches:
        raise UsageError("the validation data are a generator that yields nothing; expected batches.")
    return _dataset(lambda: iter(batches), batches, len(batches))


def batch_size_of(data: Any) -> int:
    """Returns the global batch size of a PyDataset: the largest number of rows of its first batches."""
    return _most_rows(_first_of(data))


def _most_rows(batches: list[Any]) -> int:
    return max(int(tf.nest.flatten(batch)[0].shape[0]) for batch in batches)


def _first_of(data: Any) -> list[Any]:
    count = _LOOKED_AT if data.num_batches is None else min(_LOOKED_AT, data.num_batches)
    if not count:
        raise UsageError(f"{type(data).__name__} has the length 0; expected at least one batch.")
    return [_standard(data[i]) for i in range(count)]


def _passes(data: Any, seed: int | None) -> Iterator[Any]:
    for number in itertools.count():
        count = data.num_batches
        indices: Iterable[int] = itertools.count() if count is None else range(count)
        if count is not None and seed is not None:
            indices = np.random.default_rng((seed, number)).permutation(count).tolist()
        yield from _read(data, indices)


def _read(data: Any, indices: Iterable[int]) -> Iterator[Any]:
    """Yields batches in the order of `indices`. A PyDataset with several workers loads in parallel."""
    if data.workers <= 1:
        yield from (_standard(data[i]) for i in indices)
        return
    remaining = iter(indices)
    with ThreadPoolExecutor(data.workers) as pool:
        waiting = collections.deque(
            pool.submit(data.__getitem__, i) for i in itertools.islice(remaining, data.max_queue_size)
        )
        while waiting:
            batch = waiting.popleft().result()
            waiting.extend(pool.submit(data.__getitem__, i) for i in itertools.islice(remaining, 1))
            yield _standard(batch)


def _standard(batch: Any) -> Any:
    """Returns a batch as arrays in tuples and dictionaries. Raises UsageError for an invalid batch."""
    if isinstance(batch, list):
        batch = tuple(batch)
    if not isinstance(batch, (tuple, dict)):
        batch = (batch,)
    if isinstance(batch, tuple):
        while batch and batch[-1] is None:
            batch = batch[:-1]
        if not 1 <= len(batch) <= 3 or any(part is None for part in batch):
            raise UsageError(
                f"x gave a batch of {len(batch)} parts, or with None in it; expected (inputs,), (inputs, "
                "targets) or (inputs, targets, sample_weights)."
            )
        if len(batch) == 1 and isinstance(batch[0], (tuple, list)):
            raise UsageError(
                "x gave several inputs without targets in a tuple; expected a dictionary of named inputs."
            )
    return _arrays(batch)


def _arrays(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _arrays(value) for name, value in part.items()}
    if isinstance(part, (tuple, list)):
        return tuple(map(_arrays, part))
    array = part if tf.is_tensor(part) else np.asarray(part)
    if array.dtype == object or not array.shape:
        raise UsageError(
            f"x gave a batch with {part!r:.60}; expected arrays with an axis for the examples."
        )
    return array


def _dataset(batches: Any, first: list[Any], count: int | None) -> tf.data.Dataset:
    """Returns a dataset of the batches that `batches()` yields.

    Args:
      batches: () -> iterator of batches, called once per pass.
      first: Example batches, which define the structure, shapes and dtypes.
      count: Number of batches, or None if it is unknown.
    """

    def spec(*arrays: Any) -> tf.TensorSpec:
        shapes = [a.shape for a in arrays]
        if len({len(s) for s in shapes}) > 1:
            raise UsageError(f"x gave batches of shapes {shapes}; expected the same number of axes.")
        dimensions = zip(*(s[1:] for s in shapes), strict=True)
        shape = [None, *(axis[0] if len(set(axis)) == 1 else None for axis in dimensions)]
        return tf.TensorSpec(shape, tf.as_dtype(arrays[0].dtype))

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.nest.map_structure(spec, *first))
    if count is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    return dataset
