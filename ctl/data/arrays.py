"""Examples in memory, read by index.

    ctl.from_arrays({"image": images, "label": labels}, batch_size)
    ctl.from_arrays((x, y), batch_size).map(lambda x, y: (augment(x), y))

The order of examples is a permutation that is computed from (seed, epoch), not stored. It does not depend
on the number of workers, each worker reads only its own rows, and any position is reached in O(1). A
resumed run therefore continues with the next example.

The sequence of examples is endless: position p of it is an example of epoch p // num_examples.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.row_windows import RowWindows
from ctl.distribute.row_partition import bounds
from ctl.errors import UsageError

_INT64_MAX = 2**63 - 1


class ArrayData:
    """Arrays with a common first axis, served as global batches. Created by `from_arrays`.

    Attributes:
      num_examples: Length of the first axis.
      batch_size: Global batch size (examples).
      shuffle: True for a new order in every epoch of training. Evaluation keeps the order of the arrays.
      epochs_apart: True if no batch contains examples of two epochs.
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        epochs_apart: bool = False,
        functions: tuple[Callable, ...] = (),
    ) -> None:
        self._arrays = arrays
        self.num_examples = int(tf.nest.flatten(arrays)[0].shape[0])
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.epochs_apart = epochs_apart
        self._seed = seed
        self._functions = functions

    def map(self, function: Callable) -> "ArrayData":
        """Applies `function` to batches `[b, ...]`, like `tf.data.Dataset.map` after `batch`."""
        return self._copy(functions=(*self._functions, function))

    def first_rows(self, count: int) -> Any:
        """Returns the first `count` examples as tensors, without the functions of `map`."""
        return tf.nest.map_structure(lambda a: tf.convert_to_tensor(a[:count]), self._arrays)

    def in_order(self) -> "ArrayData":
        """Returns the same examples without shuffling."""
        return self._copy(shuffle=False)

    def first_examples(self, count: int) -> "ArrayData":
        """Returns the first `count` examples without shuffling."""
        return self._copy(tf.nest.map_structure(lambda a: a[:count], self._arrays), shuffle=False)

    def _copy(
        self, arrays: Any = None, *, shuffle: bool | None = None, functions: tuple | None = None
    ) -> "ArrayData":
        return ArrayData(
            self._arrays if arrays is None else arrays,
            self.batch_size,
            seed=self._seed,
            epochs_apart=self.epochs_apart,
            shuffle=self.shuffle if shuffle is None else shuffle,
            functions=self._functions if functions is None else functions,
        )

    def replica_batches(
        self,
        *,
        seed: int,
        start: int,
        total: int | None,
        replicas: range,
        num_replicas: int,
        share: tuple = (0, 1),
    ) -> tf.data.Dataset:
        """Returns the batches of some replicas: step 0 of each replica, step 1 of each replica, ...

        Args:
          seed: Seed of the order. Ignored if `from_arrays` has got a seed.
          start: Number of consumed examples.
          total: Number of examples to serve, counted from example 0. The last batch may be short. None:
            endless.
          replicas: Consecutive replicas of this worker.
          num_replicas: Number of replicas of all workers.
          share: (w, W) for steps w, w + W, w + 2 W, ... only. w may be a tensor.

        Returns:
          A dataset of batches `[b, ...]`, or of pairs (batch, number of real rows) if
          `has_counted_shares` is True.
        """
        size, num_local = self.batch_size, len(replicas)
        with tf.init_scope(), tf.device("/cpu:0"):  # never copied into the graph of a function
            arrays = tf.nest.map_structure(tf.convert_to_tensor, self._arrays)
        has_equal_shares = self._has_equal_shares(start, total, num_replicas)
        is_counted = self.has_counted_shares(start, total, num_replicas)
        seed = seed if self._seed is None else self._seed

        @tf.autograph.experimental.do_not_convert
        def batch(i: Any) -> Any:
            step, replica = share[0] + i // num_local * share[1], replicas[0] + i % num_local
            first = start + step * size
            if has_equal_shares:
                b = size // num_replicas
                positions = first + replica * b + tf.range(b, dtype=tf.int64)
                return self._gather(arrays, self._index(positions, seed))
            first, num_rows = self._batch(first, total)
            low, high, num_real = bounds(num_rows, replica, num_replicas)
            rows = self._gather(arrays, self._index(tf.range(first + low, first + high), seed))
            return (rows, num_real) if is_counted else rows

        num_steps = _INT64_MAX if total is None else self._num_steps(start, total) * num_local
        dataset = tf.data.Dataset.range(num_steps)
        for function in (batch, *(_with_count(f) if is_counted else f for f in self._functions)):
            dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        if not self._functions:  # tuning costs a thread and cannot speed up a gather
            options = tf.data.Options()
            options.autotune.enabled = False
            dataset = dataset.with_options(options)
        return dataset

    def windows(self, *, seed: int, start: int, total: int | None, device: str | None) -> RowWindows:
        """Returns the batches of `replica_batches` for one replica, as row numbers.

        Args:
          seed: As in `replica_batches`.
          start: As in `replica_batches`.
          total: As in `replica_batches`.
          device: Device to which the arrays are copied.
        """
        with tf.device(device):
            arrays = tf.nest.map_structure(tf.convert_to_tensor, self._arrays)
        seed, end = seed if self._seed is None else self._seed, None
        if total is not None:
            last = (-(-total // self.batch_size) - 1) * self.batch_size
            end = sum(map(int, self._batch(last, total)))
        return RowWindows(
            arrays,
            self._functions,
            lambda positions: self._index(positions, seed),
            self.batch_size,
            start=int(self._batch(start, total)[0]),
            end=end,
            epochs_apart=self.epochs_apart,
        )

    @property
    def steps_per_epoch(self) -> float:
        """Number of batches in an epoch. An integer if epochs are apart or batches fill an epoch."""
        batches = self.num_examples / self.batch_size
        return float(-(-self.num_examples // self.batch_size)) if self.epochs_apart else batches

    def num_examples_in(self, epochs: float) -> int:
        """Returns the number of examples in `epochs`. With `epochs_apart` a short batch counts as full."""
        per_epoch = self.steps_per_epoch * self.batch_size if self.epochs_apart else self.num_examples
        return math.ceil(epochs * per_epoch)

    def _batch(self, first: Any, total: int | None) -> Any:
        """Returns the position of the first example of a batch, and the number of its examples.

        `first` is the number of examples before the batch; with `epochs_apart` a short batch counts as
        full.
        """
        size = tf.cast(self.batch_size, tf.int64)
        if not self.epochs_apart:
            return first, size if total is None else tf.minimum(size, total - first)
        step, per_epoch = first // size, int(self.steps_per_epoch)
        offset = step % per_epoch * size
        return step // per_epoch * self.num_examples + offset, tf.minimum(size, self.num_examples - offset)

    def has_counted_shares(self, start: int, total: int | None, num_replicas: int) -> bool:
        """Returns True if a share may be empty. Then `replica_batches` yields numbers of real rows."""
        return num_replicas > 1 and not self._has_equal_shares(start, total, num_replicas)

    def _has_equal_shares(self, start: int, total: int | None, num_replicas: int) -> bool:
        size = self.batch_size
        num_examples = self.num_examples if self.epochs_apart else (0 if total is None else total - start)
        return size % num_replicas == 0 and num_examples % size == 0

    @staticmethod
    def _gather(arrays: Any, index: Any) -> Any:
        return tf.nest.map_structure(lambda a: tf.gather(a, index), arrays)

    def _num_steps(self, start: int, total: int) -> int:
        return max(0, -(-(total - start) // self.batch_size))

    def _index(self, positions: Any, seed: int) -> Any:
        """Converts positions in the endless sequence, int64 `[b]`, to indices of examples `[b]`."""
        n = self.num_examples
        offsets = positions % n
        if not self.shuffle or n == 1:
            return offsets
        epochs = positions // n
        seeds = tf.fill(tf.shape(positions), tf.cast(seed, tf.int64))
        # The Python wrapper, tf.random.experimental.index_shuffle, pads a seed per row wrongly.
        return tf.raw_ops.RandomIndexShuffle(
            index=offsets,
            seed=tf.stack([seeds, epochs, epochs * 0], axis=1),
            max_index=tf.constant(n - 1, tf.int64),
            rounds=4,
        )


class ExampleNumbers:
    """Endless global batches of the numbers 0, 1, 2, ... Created by `example_numbers`."""

    def __init__(self, batch_size: int):
        self.batch_size = batch_size

    def replica_batches(
        self, start: int, replicas: range, num_replicas: int, share: tuple = (0, 1)
    ) -> tf.data.Dataset:
        """Returns the batches of some replicas from the number `start`. See `ArrayData.replica_batches`."""
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
      batch_size: Global batch size (examples).

    Returns:
      A value to return from `train_data`. Batches are int64 `[b]`.
    """
    return ExampleNumbers(batch_size)


def _with_count(function: Callable) -> Callable:
    """Returns `function` for elements (batch, number of real rows)."""

    def mapped(batch: Any, num_real: Any) -> Any:
        is_spread = isinstance(batch, tuple) and not hasattr(batch, "_fields")
        return (function(*batch) if is_spread else function(batch)), num_real

    return mapped


def from_arrays(
    arrays: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int | None = None,
    epochs_apart: bool = False,
) -> ArrayData:
    """Returns global batches of examples in memory.

    An epoch is n examples. In a run of a number of steps all batches are full, so a batch may contain the
    end of an epoch and the start of the next one. A run of a number of epochs ends with a short batch.

    Args:
      arrays: A NumPy array or tensor `[n, ...]`, or a nested tuple, list or dictionary of them with equal
        n.
      batch_size: Global batch size (examples): the argument of `train_data`.
      shuffle: True for a new order in every epoch. Evaluation never shuffles.
      seed: Seed of the order. None: the seed of the trainer.
      epochs_apart: True to end every epoch with a batch of its remaining examples, as Keras does.

    Returns:
      A value to return from `train_data` or `eval_data`. Its method `map` applies a function to batches.

    Raises:
      UsageError: There are no arrays or no examples, or the arrays have unequal lengths or hold objects.
    """
    arrays = _lists_as_tuples(arrays)
    flat = tf.nest.flatten(arrays)
    if not flat:
        raise UsageError("from_arrays got no arrays; expected at least one, e.g. (x, y).")
    if isinstance(batch_size, bool) or not isinstance(batch_size, numbers.Integral) or batch_size < 1:
        raise UsageError(f"from_arrays got batch_size={batch_size!r}; expected examples, at least 1.")
    flat = [a if isinstance(a, tf.Tensor) else np.asarray(a) for a in flat]
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
            "For lists of unequal length write tf.data.Dataset.from_tensor_slices(tf.ragged.constant(...))."
        )
    return ArrayData(
        tf.nest.pack_sequence_as(arrays, flat),
        batch_size,
        shuffle=shuffle,
        seed=seed,
        epochs_apart=epochs_apart,
    )


def _lists_as_tuples(arrays: Any) -> Any:
    """Replaces lists by tuples, because tf.data would stack a list into one tensor."""
    if isinstance(arrays, dict):
        return type(arrays)((k, _lists_as_tuples(v)) for k, v in arrays.items())
    if isinstance(arrays, (list, tuple)) and not hasattr(arrays, "_fields"):
        return tuple(_lists_as_tuples(a) for a in arrays)
    return arrays
