"""Examples in memory, read by index.

    ctl.from_arrays({"image": images, "label": labels}, batch_size)
    ctl.from_arrays((x, y), batch_size).map(lambda x, y: (augment(x), y))

Arrays may be dense, ragged or sparse. Their order is defined in indexed.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.array_like import SparseRows, as_arrays
from ctl.data.indexed import IndexedData, Rows
from ctl.errors import UsageError
from ctl.setting_values import check_integer


class ArrayRows(Rows):
    """Rows of arrays with a common first axis.

    Args:
      arrays: Nested dense arrays or tensors `[n, ...]`, ragged tensors or `SparseRows`.
    """

    is_in_memory = True
    description = "examples in memory"

    def __init__(self, arrays: Any):
        self._arrays = arrays
        self.num_examples = int(tf.nest.flatten(arrays)[0].shape[0])

    def reader(self) -> Callable[[Any, Any], Any]:
        """Returns a function (numbers, epochs; int64 `[b]`) -> batch of these rows."""
        with tf.init_scope(), tf.device("/cpu:0"):  # never copied into the graph of a function
            arrays = tf.nest.map_structure(_as_tensor, self._arrays)
        return lambda numbers, epochs: tf.nest.map_structure(lambda a: _gather(a, numbers), arrays)

    def first(self, count: int) -> "ArrayRows":
        """Returns the first `count` rows."""
        return ArrayRows(tf.nest.map_structure(lambda a: a[:count], self._arrays))

    def read_first(self, count: int) -> Any:
        """Returns the first `count` rows as tensors."""
        return self.reader()(tf.range(count, dtype=tf.int64), None)

    def tensors(self) -> Any:
        """Returns the arrays. None: some are ragged or sparse."""
        is_dense = [not isinstance(a, (tf.RaggedTensor, SparseRows)) for a in tf.nest.flatten(self._arrays)]
        return self._arrays if all(is_dense) else None


def _as_tensor(array: Any) -> Any:
    is_composite = isinstance(array, (tf.RaggedTensor, SparseRows))
    return array if is_composite else tf.convert_to_tensor(array)


def _gather(array: Any, numbers: Any) -> Any:
    return array.gather(numbers) if isinstance(array, SparseRows) else tf.gather(array, numbers)


class ExampleNumbers:
    """Endless global batches of the numbers 0, 1, 2, ... Created by `example_numbers`."""

    def __init__(self, batch_size: int):
        self.batch_size = check_integer("batch_size", batch_size, 1)

    def replica_batches(
        self, start: int, replicas: range, num_replicas: int, share: tuple = (0, 1)
    ) -> tf.data.Dataset:
        """Returns the batches of some replicas from `start` on. See `IndexedData.replica_batches`."""
        rows, num_local = self.batch_size // num_replicas, len(replicas)

        @tf.autograph.experimental.do_not_convert
        def batch(i: Any) -> Any:
            step = share[0] + i // num_local * share[1]
            first = start + step * self.batch_size + (replicas[0] + i % num_local) * rows
            return first + tf.range(rows, dtype=tf.int64)

        return tf.data.Dataset.range(2**62).map(batch)


def example_numbers(batch_size: int) -> ExampleNumbers:
    """Returns data for a step that generates its own examples: a batch holds the numbers of its examples.

    A number occurs once in a run. Numbers do not depend on the number of replicas or on a resume, so a step
    can use them as seeds of `tf.random.stateless_uniform` or as numbers of games to play.

    Args:
      batch_size: Global batch size (examples), an integer >= 1.

    Returns:
      A value to return from `train_data`. Batches are int64 `[b]`.
    """
    return ExampleNumbers(batch_size)


def from_arrays(
    arrays: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int | None = None,
    epochs_apart: bool = False,
) -> IndexedData:
    """Returns global batches of examples in memory.

    An epoch is n examples. In a run of a number of steps all batches are full, so a batch may contain the
    end of an epoch and the start of the next one. A run of a number of epochs ends with a short batch.

    Args:
      arrays: A NumPy array or tensor `[n, ...]`, or a nested tuple, list or dictionary of them with equal
        n. A tensor may be ragged or sparse. A pandas DataFrame is an array `[n, columns]`, with floats as
        float32; `dict(frame)` has an array for each column.
      batch_size: Global batch size (examples): the argument of `train_data`.
      shuffle: True for a new order in every epoch. Evaluation never shuffles.
      seed: Seed of the order. None: the seed of the trainer.
      epochs_apart: True to end every epoch with a batch of its remaining examples, as Keras does.

    Returns:
      A value to return from `train_data` or `eval_data`. Its method `map` applies a function to batches.

    Raises:
      UsageError: There are no arrays or examples, lengths differ, or an argument is invalid.
    """
    arrays = as_arrays(arrays)
    flat = tf.nest.flatten(arrays)
    if not flat:
        raise UsageError("from_arrays got no arrays; expected at least one, e.g. (x, y).")
    shapes = [tuple(a.shape) for a in flat]
    if any(not s for s in shapes) or len({s[0] for s in shapes}) != 1:
        raise UsageError(
            f"from_arrays got arrays of shapes {', '.join(map(str, shapes))}; expected the same "
            "number of examples on the first axis of each."
        )
    if shapes[0][0] == 0:
        raise UsageError("from_arrays got arrays of 0 examples; expected at least one.")
    if any(isinstance(a, np.ndarray) and a.dtype.hasobject for a in flat):
        raise UsageError(
            "from_arrays got an array of Python objects; expected numbers or strings of one dtype. "
            "For lists of unequal length write tf.ragged.constant(...)."
        )
    return IndexedData(ArrayRows(arrays), batch_size, shuffle=shuffle, seed=seed, epochs_apart=epochs_apart)
