"""Examples held in memory, served by index: any position in O(1), each worker touches its own rows.

    ctl.from_arrays({"image": images, "label": labels}, batch_size)
    ctl.from_arrays((x, y), batch_size).map(lambda x, y: (augment(x), y))

The order is a permutation of the examples by (seed, epoch), computed and not stored: every number
of workers sees the same global order, and a resumed run goes on with the very next example.
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


class ArrayData:
    """Arrays with a common first axis, as global batches; made by `from_arrays`.

    Attributes:
      num_examples: length of the first axis.
      batch_size: global batch size, examples.
      shuffle: a new order every epoch when training; evaluation keeps the order.
      epochs_apart: no batch holds the end of one epoch and the start of the next.
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        epochs_apart: bool = False,
    ) -> None:
        self._arrays = arrays
        self.num_examples = int(tf.nest.flatten(arrays)[0].shape[0])
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.epochs_apart = epochs_apart
        self._seed = seed
        self._functions: tuple[Callable, ...] = ()

    def map(self, function: Callable) -> "ArrayData":
        """Applies `function` to batches `[b, ...]`, like `tf.data.Dataset.map` after `batch`."""
        return self._copy(functions=(*self._functions, function))

    def first_rows(self, count: int) -> Any:
        """Returns the first `count` examples as tensors, without the functions of `map`."""
        return tf.nest.map_structure(lambda a: tf.convert_to_tensor(a[:count]), self._arrays)

    def in_order(self) -> "ArrayData":
        """The same examples without shuffling."""
        return self._copy(shuffle=False)

    def _copy(self, *, shuffle: bool | None = None, functions: tuple | None = None) -> "ArrayData":
        new = ArrayData(
            self._arrays,
            self.batch_size,
            seed=self._seed,
            epochs_apart=self.epochs_apart,
            shuffle=self.shuffle if shuffle is None else shuffle,
        )
        new._functions = self._functions if functions is None else functions
        return new

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
        """Batches of the given replicas in turn: step 0 of each, step 1 of each, ...

        Args:
          seed: decides the order, unless from_arrays was given one.
          start: examples already consumed.
          total: examples in all, counted from 0; None: endless. The last batch may be short.
          replicas: the consecutive replicas of this worker, among `num_replicas`.
          share: (w, W) for steps w, w + W, w + 2 W, ... only; w may be a tensor.
        """
        size, count = self.batch_size, len(replicas)
        with tf.init_scope(), tf.device("/cpu:0"):  # never copied into the graph of a function
            arrays = tf.nest.map_structure(tf.convert_to_tensor, self._arrays)
        fixed = self._is_fixed(start, total, num_replicas)
        counted = self.counts_shares(start, total, num_replicas)
        seed = seed if self._seed is None else self._seed

        @tf.autograph.experimental.do_not_convert
        def batch(i: Any) -> Any:
            step, r = share[0] + i // count * share[1], replicas[0] + i % count
            first = start + step * size
            if fixed:
                b = size // num_replicas
                rows = first + r * b + tf.range(b, dtype=tf.int64)
                return self._gather(arrays, self._index(rows, seed))
            first, n = self._batch(first, total)
            low, high, real = bounds(n, r, num_replicas)
            taken = self._gather(arrays, self._index(tf.range(first + low, first + high), seed))
            return (taken, real) if counted else taken

        dataset = tf.data.Dataset.range(_INT64_MAX if total is None else self._turns(start, total) * count)
        for function in (batch, *(_of_shares(f) if counted else f for f in self._functions)):
            dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        if not self._functions:  # rows are gathered: there is nothing to tune
            options = tf.data.Options()
            options.autotune.enabled = False
            dataset = dataset.with_options(options)
        return dataset

    def windows(self, *, seed: int, start: int, total: int | None, device: str | None) -> RowWindows:
        """The same batches for one replica, as numbers of rows; the arrays are copied to `device`.

        `seed`, `start` and `total` as in `replica_batches`.
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
            lambda places: self._index(places, seed),
            self.batch_size,
            start=int(self._batch(start, total)[0]),
            end=end,
            epochs_apart=self.epochs_apart,
        )

    @property
    def steps_per_epoch(self) -> float:
        """Batches in an epoch; whole only if epochs are apart or the batches fit."""
        batches = self.num_examples / self.batch_size
        return float(-(-self.num_examples // self.batch_size)) if self.epochs_apart else batches

    def examples_of(self, epochs: float) -> int:
        """Where so many epochs end, in examples; with epochs apart, short batches count as whole."""
        per_epoch = self.steps_per_epoch * self.batch_size if self.epochs_apart else self.num_examples
        return math.ceil(epochs * per_epoch)

    def _batch(self, first: Any, total: int | None) -> Any:
        """The batch at position `first`: its first place in the endless order, and its examples."""
        size = tf.cast(self.batch_size, tf.int64)
        if not self.epochs_apart:
            return first, size if total is None else tf.minimum(size, total - first)
        step, per_epoch = first // size, int(self.steps_per_epoch)
        place = step % per_epoch * size
        return step // per_epoch * self.num_examples + place, tf.minimum(size, self.num_examples - place)

    def counts_shares(self, start: int, total: int | None, num_replicas: int) -> bool:
        """Whether `replica_batches` yields (share, number of real rows): some share may be empty."""
        return num_replicas > 1 and not self._is_fixed(start, total, num_replicas)

    def _is_fixed(self, start: int, total: int | None, num_replicas: int) -> bool:
        """Whether every share has the same number of rows."""
        size = self.batch_size
        whole = self.num_examples if self.epochs_apart else (0 if total is None else total - start)
        return size % num_replicas == 0 and whole % size == 0

    @staticmethod
    def _gather(arrays: Any, index: Any) -> Any:
        return tf.nest.map_structure(lambda a: tf.gather(a, index), arrays)

    def _turns(self, start: int, total: int) -> int:
        return max(0, -(-(total - start) // self.batch_size))

    def _index(self, rows: Any, seed: int) -> Any:
        """Places in the endless order `[b]` -> indices of examples `[b]`."""
        n = self.num_examples
        place = rows % n
        if not self.shuffle or n == 1:
            return place
        epoch = rows // n
        same = tf.fill(tf.shape(rows), tf.cast(seed, tf.int64))
        # The Python wrapper, tf.random.experimental.index_shuffle, pads a seed per row wrongly.
        return tf.raw_ops.RandomIndexShuffle(
            index=place,
            seed=tf.stack([same, epoch, epoch * 0], axis=1),
            max_index=tf.constant(n - 1, tf.int64),
            rounds=4,
        )


class ExampleNumbers:
    """Endless global batches of the numbers 0, 1, 2, ...; made by `example_numbers`."""

    def __init__(self, batch_size: int):
        self.batch_size = batch_size

    def replica_batches(
        self, start: int, replicas: range, num_replicas: int, share: tuple = (0, 1)
    ) -> tf.data.Dataset:
        """Batches of the given replicas in turn, from the number `start` on; `share` as in ArrayData."""
        rows, count = self.batch_size // num_replicas, len(replicas)

        @tf.autograph.experimental.do_not_convert
        def batch(i: Any) -> Any:
            step = share[0] + i // count * share[1]
            first = start + step * self.batch_size + (replicas[0] + i % count) * rows
            return first + tf.range(rows, dtype=tf.int64)

        return tf.data.Dataset.range(2**62).map(batch)


def example_numbers(batch_size: int) -> ExampleNumbers:
    """What `train_data` returns for a step that makes its own data: a batch is its examples' numbers.

    Each is an int64 that never comes twice, the same for any number of replicas and after a resume:
    a seed for `tf.random.stateless_uniform`, the number of a game to be played.
    """
    return ExampleNumbers(batch_size)


_INT64_MAX = 2**63 - 1


def _of_shares(function: Callable) -> Callable:
    """A function of batches, for elements (batch, number of real rows)."""

    def mapped(batch: Any, real: Any) -> Any:
        spread = isinstance(batch, tuple) and not hasattr(batch, "_fields")
        return (function(*batch) if spread else function(batch)), real

    return mapped


def from_arrays(
    arrays: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int | None = None,
    epochs_apart: bool = False,
) -> ArrayData:
    """Global batches of examples held in memory: NumPy arrays or tensors, nested as you like.

    Args:
      arrays: an array `[n, ...]`, or a tuple, list or dictionary of arrays with the same n.
      batch_size: global batch size, examples; pass on what `train_data` is given.
      shuffle: another order every epoch; evaluation never shuffles.
      seed: for the order; the trainer's if None.
      epochs_apart: every epoch ends with a batch of its own, which may be short, as in Keras.

    An epoch is n examples. While training goes on for a number of steps, batches are always full:
    one may hold the end of an epoch and the start of the next. A run of whole epochs ends with a
    short batch. Raises UsageError for arrays of unequal or no length.
    """
    arrays = _without_lists(arrays)
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


def _without_lists(arrays: Any) -> Any:
    """The same structure with tuples for lists, which tf.data would stack into one tensor."""
    if isinstance(arrays, dict):
        return type(arrays)((k, _without_lists(v)) for k, v in arrays.items())
    if isinstance(arrays, (list, tuple)) and not hasattr(arrays, "_fields"):
        return tuple(_without_lists(a) for a in arrays)
    return arrays
