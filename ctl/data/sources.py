"""Conversion of the return values of `train_data` and `eval_data` to sources of global batches."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from ctl.data.array_like import is_array_like
from ctl.data.arrays import ExampleNumbers, from_arrays
from ctl.data.grain_batches import GrainBatches, is_grain_pipeline
from ctl.data.indexed import IndexedData
from ctl.data.python_batches import IteratedBatches, PyDatasetBatches, PythonBatches, is_py_dataset
from ctl.errors import UsageError


def as_source(
    data: Any,
    name: str,
    batch_size: int,
    *,
    shuffle: bool,
    seed: int | None = None,
    make_again: Callable[[], Any] | None = None,
) -> Any:
    """Converts the data of a user.

    Args:
      data: Return value of the user's method.
      name: Name of the method, for messages.
      batch_size: Global batch size (examples).
      shuffle: True to shuffle arrays, and the batches of a PyDataset.
      seed: Seed of the order of the batches of a PyDataset.
      make_again: Calls the user's method again, for a further pass over a generator.

    Returns:
      A `tf.data.Dataset`, `IndexedData`, `ExampleNumbers` or `PythonBatches`.

    Raises:
      UsageError: The data are of a type without a conversion.
    """
    if isinstance(data, (tf.data.Dataset, IndexedData, ExampleNumbers, PythonBatches)):
        return data
    if data is None:
        raise UsageError(
            f"{name} returned None; expected a tf.data.Dataset of batches, ctl.from_arrays(...), or "
            "arrays. Is there a `return`?"
        )
    if is_py_dataset(data):
        return PyDatasetBatches(data, seed if shuffle else None, name)
    if is_grain_pipeline(data):
        return GrainBatches(data, name)
    if _is_torch_loader(data):
        return IteratedBatches(functools.partial(iter, data), name)
    if isinstance(data, Iterator):
        return IteratedBatches(_iterators(data, name, make_again), name)
    parts = tf.nest.flatten(data)
    if parts and all(map(is_array_like, parts)):
        return from_arrays(data, batch_size, shuffle=shuffle)
    raise UsageError(
        f"{name} returned a {type(data).__name__}; expected a tf.data.Dataset of batches, "
        "ctl.from_arrays(...), or arrays (also in a tuple or dictionary), a pandas DataFrame, a "
        f"keras.utils.PyDataset, a Grain IterDataset or DataLoader, or a generator of batches.{_hint(data)}"
    )


def is_dataset(data: Any) -> bool:
    """Returns True for data of batches, which are not arrays."""
    if isinstance(data, (tf.data.Dataset, IndexedData, PythonBatches, Iterator)):
        return True
    return is_py_dataset(data) or is_iterable_of_batches(data)


def is_iterable_of_batches(data: Any) -> bool:
    """Returns True for a Grain `IterDataset` or `DataLoader`, or a `DataLoader` of PyTorch."""
    return is_grain_pipeline(data) or _is_torch_loader(data)


def as_dataset(data: Any, name: str, batch_size: int, *, shuffle: bool) -> Any:
    """Returns `as_source` with Python batches as a dataset of one pass."""
    source = as_source(data, name, batch_size, shuffle=shuffle)
    if not isinstance(source, PythonBatches):
        return source
    if source.num_batches is None:
        return source.dataset
    return source.dataset.apply(tf.data.experimental.assert_cardinality(source.num_batches))


def _iterators(
    first: Iterator[Any], name: str, make_again: Callable[[], Any] | None
) -> Callable[[], Iterator[Any]]:
    """Returns a function that returns `first`, and then new iterators of the user's method."""
    pending = [first]

    def make_iterator() -> Iterator[Any]:
        if pending:
            return pending.pop()
        iterator = None if make_again is None else make_again()
        if not isinstance(iterator, Iterator) or iterator is first:
            returned = "the same one" if iterator is first else f"a {type(iterator).__name__}"
            raise UsageError(
                f"{name} has to return a new generator in each call, for a further pass over the data; it "
                f"returned {returned}."
            )
        return iterator

    return make_iterator


def _is_torch_loader(value: Any) -> bool:
    return any(
        c.__name__ == "DataLoader" and c.__module__.startswith("torch.") for c in type(value).__mro__
    )


def _hint(data: Any) -> str:
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, bytes)):
        return " For a source of single examples write ctl.from_source(source, batch_size)."
    if callable(data):
        return f" Call it: return {getattr(data, '__name__', 'data')}()."
    return ""
