"""Global batches that Python code reads, as datasets: `keras.utils.PyDataset`, generators, other iterables.

Every worker reads the global batches, so the Python code must produce the same batches on every worker.
Datasets of Grain save their position (grain_batches.py).
"""

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from ctl.data.array_like import as_tensor, is_array_like
from ctl.errors import UsageError
from ctl.tensorflow_patches.dataset_attributes import pipeline_parts

_LOOKED_AT = 2  # number of batches to compare for axes of variable size, as in Keras
# first batches of datasets that can be read only once
_first_batches: weakref.WeakKeyDictionary[tf.data.Dataset, Any] = weakref.WeakKeyDictionary()


class PythonBatches:
    """Global batches of Python code. Base class.

    Attributes:
      dataset: A pass over the batches. Each iteration over it is the next pass.
      num_batches: Number of batches of a pass. None: unknown, or infinite like the dataset.
      mode: Way to reach a position, a value of `Config.data_position`.
    """

    dataset: tf.data.Dataset
    num_batches: int | None = None
    mode = "skip"

    def start_at(self, before: int, skipped: int, state: Any) -> bool:
        """Starts the next pass at a position, without reading the batches before it.

        Args:
          before: Number of batches of passes that have ended and are not iterated again.
          skipped: Number of batches after them, also of several passes.
          state: A result of `state_at` for this position, or None.

        Returns:
          False if `skipped` batches have to be read.
        """
        return False

    def state_at(self, num_batches: int) -> Any:
        """Returns a JSON object for `start_at` after `num_batches` batches of all passes, or None."""
        return None


class IteratedBatches(PythonBatches):
    """Batches of an iterable.

    Args:
      make_iterator: Returns an iterator for the next pass.
      name: Name of the data, for messages.
    """

    def __init__(self, make_iterator: Callable[[], Iterator[Any]], name: str):
        self._make_iterator = make_iterator
        iterator = make_iterator()
        first = list(itertools.islice(iterator, _LOOKED_AT))
        if not first:
            raise UsageError(f"{name} yields no batch; expected at least one.")
        self._name = name
        self._next: Iterator[Any] | None = itertools.chain(first, iterator)
        self.dataset = _dataset(self._batches, [_arrays(batch, name) for batch in first], None, name)

    def _batches(self) -> Iterator[Any]:
        iterator, self._next = self._next, None
        for batch in self._make_iterator() if iterator is None else iterator:
            yield _arrays(batch, self._name)


class PyDatasetBatches(PythonBatches):
    """Batches of a `keras.utils.PyDataset`, with its hooks for epochs. A position is reached by index.

    Args:
      data: The PyDataset.
      seed: Seed of the order of the batches, which differs between passes. None: no shuffling.
      name: Name of the data, for messages.
    """

    mode = "indexed"

    def __init__(self, data: Any, seed: int | None, name: str):
        self._data, self._seed, self._name = data, seed, name
        self._pass, self._first = 0, 0
        self.num_batches = data.num_batches
        first = [_arrays(data[i], name) for i in _first_indices(data)]
        count = tf.data.INFINITE_CARDINALITY if data.num_batches is None else None  # a pass may start later
        self.dataset = _dataset(self._batches, first, count, name)

    def start_at(self, before: int, skipped: int, state: Any) -> bool:
        """Starts the next pass there. Calls the hooks of the earlier passes, which may shuffle."""
        count, position = self._data.num_batches, before + skipped
        number, self._first = (0, position) if count is None else divmod(position, count)
        while self._pass < number:
            self._begin_pass()
            self._data.on_epoch_end()
        return True

    def _begin_pass(self) -> int:
        """Calls the hooks before a pass. Returns its number."""
        if not self._pass:
            self._data.on_epoch_end()  # also before the first pass, as in Model.fit
        self._data.on_epoch_begin()
        self._pass += 1
        return self._pass - 1

    def _batches(self) -> Iterator[Any]:
        number = self._begin_pass()
        first, self._first = self._first, 0
        indices = itertools.islice(_indices(self._data, self._seed, number), first, None)
        for batch in _read(self._data, indices):
            yield _arrays(batch, self._name)
        self._data.on_epoch_end()


class RowsOfPyDataset:
    """The rows of the batches of a `keras.utils.PyDataset`, as a random-access source of examples.

    Args:
      data: The PyDataset.
      num_kept: Number of batches to keep, as several calls may read rows of the same batch.

    Attributes:
      name: Name of the class of `data`.
      block_size: Number of rows of a batch; the last one may have fewer.
    """

    def __init__(self, data: Any, num_kept: int):
        if data.num_batches is None:
            raise UsageError(
                f"from_source got a {type(data).__name__} without a length (num_batches is None); expected "
                "a number of batches. Return it from train_data instead, which reads it in order."
            )
        self.name = type(data).__name__
        self._data, self._num_kept = data, num_kept
        self._batches: collections.OrderedDict[int, Future] = collections.OrderedDict()
        self._lock = threading.Lock()
        last = data.num_batches - 1
        self.block_size = _most_rows([self._batch(0)]) if data.num_batches else 1
        self._length = self.block_size * last + _most_rows([self._batch(last)]) if data.num_batches else 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[int]) -> list[Any]:
        """Returns rows by number. Gets each batch once for consecutive rows."""
        rows = []
        for number, group in itertools.groupby(indices, lambda index: index // self.block_size):
            batch = self._batch(number)
            expected = self.block_size if number < self._data.num_batches - 1 else None
            if expected is not None and _most_rows([batch]) != expected:
                raise UsageError(
                    f"batch {number} of a {type(self._data).__name__} has {_most_rows([batch])} rows; "
                    f"expected {expected} as in batch 0. Return the PyDataset itself from train_data."
                )
            for index in group:
                row = [array[index % self.block_size] for array in tf.nest.flatten(batch)]
                rows.append(tf.nest.pack_sequence_as(batch, row))
        return rows

    def _batch(self, number: int) -> Any:
        with self._lock:
            batch, is_new = self._batches.get(number), number not in self._batches
            if batch is None:
                batch = self._batches[number] = Future()
            self._batches.move_to_end(number)
            while len(self._batches) > self._num_kept:
                self._batches.popitem(last=False)
        if is_new:
            try:
                batch.set_result(_arrays(self._data[number], self.name))
            except BaseException as e:
                with self._lock:
                    self._batches.pop(number, None)
                batch.set_exception(e)
        return batch.result()


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
        yield from map(_standard, _read(data, range(count)))
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
        raise UsageError("x is a generator that yields no batch; expected at least one.")
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
        raise UsageError("the validation data are a generator that yields no batch; expected at least one.")
    return _dataset(lambda: iter(batches), batches, len(batches))


def batch_size_of(data: Any) -> int:
    """Returns the global batch size of a PyDataset: the largest number of rows of its first batches."""
    return _most_rows(_first_of(data))


def _most_rows(batches: list[Any]) -> int:
    return max(int(tf.nest.flatten(batch)[0].shape[0]) for batch in batches)


def _first_of(data: Any) -> list[Any]:
    return [_standard(data[i]) for i in _first_indices(data)]


def _first_indices(data: Any) -> range:
    count = _LOOKED_AT if data.num_batches is None else min(_LOOKED_AT, data.num_batches)
    if not count:
        raise UsageError(f"{type(data).__name__} has the length 0; expected at least one batch.")
    return range(count)


def _passes(data: Any, seed: int | None) -> Iterator[Any]:
    for number in itertools.count():
        yield from map(_standard, _read(data, _indices(data, seed, number)))


def _indices(data: Any, seed: int | None, number: int) -> Iterable[int]:
    """Returns the order of the batches in pass `number`."""
    count = data.num_batches
    if count is None:
        return itertools.count()
    if seed is None:
        return range(count)
    return np.random.default_rng((seed, number)).permutation(count).tolist()


def _read(data: Any, indices: Iterable[int]) -> Iterator[Any]:
    """Yields batches in the order of `indices`. A PyDataset with several workers loads in parallel."""
    if data.workers <= 1:
        yield from (data[i] for i in indices)
        return
    remaining = iter(indices)
    with ThreadPoolExecutor(data.workers) as pool:
        waiting = collections.deque(
            pool.submit(data.__getitem__, i) for i in itertools.islice(remaining, data.max_queue_size)
        )
        while waiting:
            batch = waiting.popleft().result()
            waiting.extend(pool.submit(data.__getitem__, i) for i in itertools.islice(remaining, 1))
            yield batch


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
                f"x yielded a tuple of {len(batch)} parts, or a tuple that contains None; expected "
                "(inputs,), (inputs, targets) or (inputs, targets, sample_weights)."
            )
        if len(batch) == 1 and isinstance(batch[0], (tuple, list)):
            raise UsageError(
                "x yielded a tuple of inputs without targets; expected a dictionary of named inputs."
            )
    return _arrays(batch)


def _arrays(part: Any, name: str = "x") -> Any:
    """Returns nested arrays, and ragged or sparse tensors, of the data with this `name`."""
    if isinstance(part, dict):
        return {key: _arrays(value, name) for key, value in part.items()}
    if isinstance(part, (tuple, list)):
        parts = [_arrays(value, name) for value in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    array = as_tensor(part) if is_array_like(part) else np.asarray(part)
    if array.dtype == object or not array.shape:
        raise UsageError(
            f"{name} gave a batch with {part!r:.60}; expected arrays with an axis for the examples."
        )
    return array


def _dataset(batches: Any, first: list[Any], count: int | None, name: str = "x") -> tf.data.Dataset:
    """Returns a dataset of the batches that `batches()` yields.

    `batches` is called once per pass. `first` are examples, which define structure, shapes and dtypes.
    """

    def spec(*arrays: Any) -> tf.TypeSpec:
        shapes = [tuple(a.shape) for a in arrays]
        if len({len(s) for s in shapes}) > 1:
            raise UsageError(f"{name} gave batches of shapes {shapes}; expected the same number of axes.")
        dimensions = zip(*(s[1:] for s in shapes), strict=True)
        shape = [None, *(axis[0] if len(set(axis)) == 1 else None for axis in dimensions)]
        dtype = tf.as_dtype(arrays[0].dtype)
        if isinstance(arrays[0], tf.RaggedTensor):
            return tf.RaggedTensorSpec(shape, dtype, arrays[0].ragged_rank)
        is_sparse = isinstance(arrays[0], tf.SparseTensor)
        return tf.SparseTensorSpec(shape, dtype) if is_sparse else tf.TensorSpec(shape, dtype)

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.nest.map_structure(spec, *first))
    if count is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    return dataset
