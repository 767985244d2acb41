"""Examples of a random-access source, read in threads ahead of the step.

    ctl.from_source(source, batch_size)                                # source[i] returns an example
    ctl.from_source(paths, batch_size, transform=lambda path: np.load(path))

A source has `__len__` and `__getitem__`: a Grain `MapDataset` or `RandomAccessDataSource`, an ArrayRecord
file, a dataset in the style of PyTorch, a `keras.utils.PyDataset`, or a list of files. Every worker reads
only its own examples. Order, epochs and resume are those of arrays (indexed.py).
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.grain_batches import is_grain_map_dataset
from ctl.data.indexed import IndexedData, Rows
from ctl.data.python_batches import RowsOfPyDataset, is_py_dataset
from ctl.errors import UsageError
from ctl.io.error_report import named_errors
from ctl.setting_values import check_integer, check_type

_MOST_EXAMPLES = 2**53  # a source with more repeats itself without end
_MOST_PARALLEL_BATCHES = 8


class SourceRows(Rows):
    """Examples of a random-access source.

    Args:
      source: The source.
      transform: Function of an example, called in the threads, or None.
      num_threads: Number of examples to read at the same time, of all batches together.
      num_examples: Number of examples, counted from the first one.
      example: The first example, as `_example_arrays` returns it.
    """

    def __init__(
        self, source: Any, transform: Callable | None, num_threads: int, *, num_examples: int, example: Any
    ):
        self.num_examples = num_examples
        self._name = _name_of(source)
        self.description = f"examples of a {self._name}"
        self.block_size = source.block_size if isinstance(source, RowsOfPyDataset) else 1
        self._source, self._transform, self._num_threads = source, transform, num_threads
        self._example = example
        self._has_epochs = is_grain_map_dataset(source) and num_examples == len(source)
        self._leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(example)]
        self._dtypes = [tf.as_dtype(_tensor_dtype(leaf)) for leaf in self._leaves]

    def reader(self) -> Callable[[Any, Any], Any]:
        """Returns a function (numbers, epochs; int64 `[b]`) -> batch of these examples."""

        def read(numbers: Any, epochs: Any) -> Any:
            if self._has_epochs:  # Grain derives the random numbers of an example from its index
                numbers = numbers + epochs * len(self._source)
            arrays = tf.numpy_function(self._read, [numbers], self._dtypes)
            for array, leaf in zip(arrays, self._leaves, strict=True):
                array.set_shape([numbers.shape[0], *leaf.shape])
            return tf.nest.pack_sequence_as(self._example, arrays)

        return read

    def first(self, count: int) -> "SourceRows":
        """Returns the first `count` examples."""
        return SourceRows(
            self._source,
            self._transform,
            self._num_threads,
            num_examples=min(count, self.num_examples),
            example=self._example,
        )

    def read_first(self, count: int) -> Any:
        """Reads the first `count` examples. Returns nested tensors `[count, ...]`."""
        arrays = map(tf.convert_to_tensor, self._read(np.arange(count)))
        return tf.nest.pack_sequence_as(self._example, list(arrays))

    def num_parallel_batches(self, batch_size: int) -> int:
        """Returns the number of batches that keep all threads busy. 1 for one thread."""
        if self._num_threads == 1:
            return 1
        return min(_MOST_PARALLEL_BATCHES, 1 + -(-self._num_threads // batch_size))

    def _read(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Returns the arrays `[b, ...]` of the leaves of examples, for numbers int64 `[b]`."""
        indices = numbers.tolist()
        size = max(1, -(-len(indices) // self._num_threads))
        parts = [indices[i : i + size] for i in range(0, len(indices), size)]
        examples = [example for results in self._run(parts) for example in results()]
        columns = zip(*examples, strict=True)
        return [_stacked(column, leaf, indices) for column, leaf in zip(columns, self._leaves, strict=True)]

    def _run(self, parts: Sequence[Sequence[int]]) -> list[Callable[[], list]]:
        """Starts to read parts in the threads. Returns functions that wait for their examples."""
        readers: list[Callable[[], list]] = [functools.partial(self._examples, part) for part in parts]
        if self._num_threads == 1:
            return readers
        pool = _thread_pool(self._num_threads, os.getpid())
        try:
            return [pool.submit(read).result for read in readers]
        except RuntimeError:  # the process exits and has ended the threads, but not this reading ahead
            return readers

    def _examples(self, indices: Sequence[int]) -> list[list[np.ndarray]]:
        """Reads examples. Returns the leaves of each."""
        source, elements = self._source, None
        if hasattr(source, "__getitems__"):
            with named_errors(f"one of the examples {', '.join(map(str, indices))} of a {self._name}"):
                elements = list(source.__getitems__(indices))
        examples = []
        for index, i in zip(indices, range(len(indices if elements is None else elements)), strict=True):
            with named_errors(f"example {index} of a {self._name}"):
                element = source[index] if elements is None else elements[i]
                example = _example_of(source, element, self._transform)
            try:
                tf.nest.assert_same_structure(example, self._example)
            except (TypeError, ValueError):
                raise UsageError(
                    f"example {index} of a {self._name} has the structure {_structure(example)}; expected "
                    f"that of example 0, {_structure(self._example)}."
                ) from None
            examples.append(tf.nest.flatten(example))
        return examples


def from_source(
    source: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int | None = None,
    transform: Callable | None = None,
    num_threads: int = 16,
    epochs_apart: bool = False,
) -> IndexedData:
    """Returns global batches of the examples of a random-access source.

    `source[i]` returns example i: an array, a number, text, or a nested tuple, list or dictionary of them.
    A list of numbers is an array. Python floats become float32. All examples have the same structure,
    shapes and dtypes. Examples are read in threads while steps run. Write `num_threads=1` for a source that
    several threads cannot read at the same time.

    A `keras.utils.PyDataset` returns batches. Their rows are the examples, and shuffling changes the order
    of its batches. Its hooks for epochs are not called; return the PyDataset itself from `train_data` if it
    requires them.

    A Grain `MapDataset` also gets the epoch: its index is epoch * n + i, so its own shuffling and random
    operations differ between epochs.

    >>> ctl.from_source(range(1000), batch_size).map(lambda number: tf.cast(number, tf.float32) / 1000.0)

    Args:
      source: Object with `__len__` and `__getitem__`.
      batch_size: Global batch size (examples): the argument of `train_data`.
      shuffle: True for a new order in every epoch. Evaluation never shuffles.
      seed: Seed of the order. None: the seed of the trainer.
      transform: Function of one example, called in the threads. Unlike the functions of `map`, which get
        batches of tensors, it is Python code. It must return the same result for the same example.
      num_threads: Number of examples to read at the same time.
      epochs_apart: True to end every epoch with a batch of its remaining examples, as Keras does.

    Returns:
      A value to return from `train_data` or `eval_data`. Its method `map` applies a function to batches.

    Raises:
      UsageError: The source has no length, no examples or no end, or an argument is invalid.
    """
    check_integer("num_threads", num_threads, 1)
    check_type("transform", transform, Callable | None)
    has_length = hasattr(source, "__len__") or is_py_dataset(source)  # which may define num_batches alone
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        raise UsageError(
            "from_source got a DataFrame, whose [i] is a column; expected examples by number. Write "
            "ctl.from_arrays(frame, batch_size), or dict(frame) for an array per column."
        )
    if not (has_length and hasattr(source, "__getitem__")) or isinstance(source, dict):
        raise UsageError(
            f"from_source got a {type(source).__name__}; expected an object with __len__ and __getitem__, "
            "such as a list, a Grain MapDataset or a dataset in the style of PyTorch."
        )
    rows: Rows = _rows_of(source, transform, num_threads)
    return IndexedData(rows, batch_size, shuffle=shuffle, seed=seed, epochs_apart=epochs_apart)


@functools.cache
def _thread_pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    """Returns the threads that all sources of a process share.

    TensorFlow never releases the functions of datasets, so threads of a single source would not end.
    `process` identifies this process, because a fork has no threads.
    """
    del process
    return ThreadPoolExecutor(num_threads, thread_name_prefix="ctl-source")


def _rows_of(source: Any, transform: Callable | None, num_threads: int) -> Rows:
    if is_py_dataset(source):
        source = RowsOfPyDataset(source, num_kept=num_threads + _MOST_PARALLEL_BATCHES)
    name, length = _name_of(source), len(source)
    if length == 0:
        raise UsageError(f"from_source got a {name} of length 0; expected at least one example.")
    if length > _MOST_EXAMPLES:
        raise UsageError(
            f"from_source got a {name} that repeats itself without end; expected the examples of one "
            "epoch. Remove repeat(): training repeats the source."
        )
    element = source[0]
    example = _example_of(source, element, transform)
    if not tf.nest.flatten(example):
        raise UsageError(f"from_source got a {name} whose first example is empty: {element!r:.60}.")
    return SourceRows(source, transform, num_threads, num_examples=length, example=example)


def _name_of(source: Any) -> str:
    return source.name if isinstance(source, RowsOfPyDataset) else type(source).__name__


def _example_of(source: Any, element: Any, transform: Callable | None) -> Any:
    """Returns `_example_arrays` of an element of a source."""
    if element is None and is_grain_map_dataset(source):
        raise UsageError(
            "from_source got None from a Grain MapDataset: the dataset filters its examples; expected an "
            "example for each index. Filter the indices first, or return an IterDataset from train_data."
        )
    return _example_arrays(element if transform is None else transform(element))


def _example_arrays(example: Any) -> Any:
    """Returns an example as nested arrays in tuples and dictionaries. Raises UsageError for others."""
    if isinstance(example, dict):
        return {key: _example_arrays(value) for key, value in example.items()}
    is_numbers = isinstance(example, list) and all(isinstance(part, (bool, int, float)) for part in example)
    if isinstance(example, tuple) or (isinstance(example, list) and not is_numbers):
        parts = [_example_arrays(part) for part in example]
        return type(example)(*parts) if hasattr(example, "_fields") else tuple(parts)
    if isinstance(example, (str, bytes)):
        text = example.encode() if isinstance(example, str) else example
        return np.array(text, dtype=object)  # a bytes dtype would lose zeros at the end
    array = np.asarray(example)
    if array.dtype.kind in "US":  # as objects, because those dtypes have a maximum length
        return (np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array).astype(object)
    if array.dtype.kind not in "biufc" and array.dtype != tf.bfloat16.as_numpy_dtype:
        raise UsageError(
            f"from_source got an example with a {type(example).__name__}: {example!r:.60}; expected "
            "arrays, numbers, text, or tuples and dictionaries of them. Convert it with transform."
        )
    is_python_float = is_numbers or (isinstance(example, float) and not isinstance(example, np.generic))
    return array.astype(np.float32) if is_python_float and array.dtype == np.float64 else array


def _stacked(arrays: Sequence[np.ndarray], expected: np.ndarray, indices: Sequence[int]) -> np.ndarray:
    """Returns an array `[b, ...]` of arrays with the shape and dtype of `expected`.

    Raises:
      UsageError: An array has another shape, or a dtype or integers that cannot be cast.
    """
    for array, index in zip(arrays, indices, strict=True):
        if array.shape != expected.shape or not _is_castable(array, expected.dtype):
            raise UsageError(
                f"example {index} has an array of {array.dtype} {array.shape}; expected "
                f"{expected.dtype} {expected.shape} as in example 0. Pad or cast it with transform."
            )
    return np.stack(arrays).astype(expected.dtype, copy=False)


def _is_castable(array: np.ndarray, dtype: np.dtype) -> bool:
    """Returns True if an array can be cast. Finite floats are rounded; integers must keep their values."""
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        return False
    if array.dtype == dtype or dtype.kind not in "iuf":
        return True
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    converted = np.isinf if dtype.kind == "f" else np.asarray
    return np.array_equal(converted(cast), converted(array))


def _tensor_dtype(array: np.ndarray) -> Any:
    return tf.string if array.dtype == object else array.dtype


def _structure(example: Any) -> str:
    return str(tf.nest.map_structure(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", example))
