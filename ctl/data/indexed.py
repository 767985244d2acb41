"""Examples that are read by number, served as global batches in an order that is computed.

The order of examples is a permutation that is computed from (seed, epoch), not stored. It does not depend
on the number of workers, each worker reads only its own rows, and any position is reached in O(1). A
resumed run therefore continues with the next example.

The sequence of examples is endless: position p of it is an example of epoch p // num_examples. The examples
themselves are the `Rows` of arrays (arrays.py) or of a random-access source (random_access.py).
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data.row_windows import RowWindows
from ctl.data.shuffling import permuted
from ctl.distribute.row_partition import bounds
from ctl.setting_values import check_integer, check_type

_INT64_MAX = 2**63 - 1


class Rows:
    """Examples that are read by number.

    Attributes:
      num_examples: Number of examples.
      block_size: Number of consecutive examples that are read together. Shuffling keeps them together.
      is_in_memory: True if `tensors` returns all examples.
      description: Kind of examples, for logs, such as "examples in memory".
    """

    num_examples: int
    block_size = 1
    is_in_memory = False
    description = "examples"

    def reader(self) -> Callable[[Any, Any], Any]:
        """Returns a traceable function that reads a batch.

        Its arguments are the numbers of the examples and their epochs, int64 `[b]`, and it returns nested
        tensors `[b, ...]`.
        """
        raise NotImplementedError

    def first(self, count: int) -> "Rows":
        """Returns the first `count` examples, or all if there are fewer."""
        raise NotImplementedError

    def read_first(self, count: int) -> Any:
        """Reads the first `count` examples. Returns nested tensors `[count, ...]`."""
        raise NotImplementedError

    def tensors(self) -> Any:
        """Returns all examples as nested dense tensors `[n, ...]`. None: they are not in memory."""
        return None

    def num_parallel_batches(self, batch_size: int) -> int:
        """Returns the number of batches to read at the same time."""
        return tf.data.AUTOTUNE


class IndexedData:
    """Examples that are read by number, as global batches. Created by `from_arrays` and `from_source`.

    Attributes:
      rows: The examples.
      batch_size: Global batch size (examples).
      shuffle: True for a new order in every epoch of training. Evaluation keeps the order of the examples.
      epochs_apart: True if no batch contains examples of two epochs.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        epochs_apart: bool = False,
        functions: tuple[Callable, ...] = (),
    ) -> None:
        check_type("shuffle", shuffle, bool)
        check_type("seed", seed, int | None)
        check_type("epochs_apart", epochs_apart, bool)
        self.rows = rows
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.shuffle = shuffle
        self.epochs_apart = epochs_apart
        self._seed = seed
        self._functions = functions
        self._has_varying_shares = False

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return self.rows.num_examples

    @property
    def is_in_memory(self) -> bool:
        """True if all examples are in memory."""
        return self.rows.is_in_memory

    def order_seed(self, seed: int) -> int | None:
        """Returns the seed of the order. `seed` is that of the trainer. None: there is no shuffling."""
        return None if not self.shuffle else seed if self._seed is None else self._seed

    def map(self, function: Callable) -> "IndexedData":
        """Applies `function` to batches `[b, ...]`, like `tf.data.Dataset.map` after `batch`."""
        return self._copy(_functions=(*self._functions, function))

    def read_first(self, count: int) -> Any:
        """Returns the first `count` examples as one batch of tensors, after the functions of `map`."""
        dataset = tf.data.Dataset.from_tensors(self.rows.read_first(min(count, self.num_examples)))
        for function in self._functions:
            dataset = dataset.map(function)
        return next(iter(dataset))

    def in_order(self) -> "IndexedData":
        """Returns the same examples without shuffling, for one pass."""
        return self._copy(shuffle=False, epochs_apart=False)

    def with_epochs_apart(self) -> "IndexedData":
        """Returns the same examples with batches that contain examples of one epoch only."""
        return self._copy(epochs_apart=True)

    def first_examples(self, count: int) -> "IndexedData":
        """Returns the first `count` examples without shuffling."""
        return self._copy(rows=self.rows.first(count), shuffle=False)

    def describe(self) -> str:
        """Returns a description for logs: "1,000 examples in memory, shuffled"."""
        order = "shuffled" if self.shuffle else "in order"
        return f"{self.num_examples:,} {self.rows.description}, {order}"

    def _copy(self, **attributes: Any) -> "IndexedData":
        """Returns a copy with other values of some attributes."""
        copied = copy.copy(self)
        vars(copied).update(attributes)
        return copied

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
          seed: Seed of the order. Ignored if the data have a seed.
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
        read = self.rows.reader()
        has_equal_shares = self._has_equal_shares(start, total, num_replicas)
        is_counted = self.has_counted_shares(start, total, num_replicas)
        seed = seed if self._seed is None else self._seed

        @tf.autograph.experimental.do_not_convert
        def batch(i: Any) -> Any:
            step, replica = (
                (i // num_local, replicas[0] + i % num_local) if num_local > 1 else (i, replicas[0])
            )
            first = start + (share[0] + step * share[1] if share[1] > 1 else step) * size
            if has_equal_shares:
                b = size // num_replicas
                return read(*self._numbers(first + replica * b + tf.range(b, dtype=tf.int64), seed, total))
            first, num_rows = self._batch(first, total)
            end, num_real = first + num_rows, num_rows
            if num_replicas > 1:
                low, high, num_real = bounds(num_rows, replica, num_replicas)
                first, end = first + low, first + high
            rows = read(*self._numbers(tf.range(first, end), seed, total))
            return (rows, num_real) if is_counted else rows

        num_steps = _INT64_MAX if total is None else max(0, -(-(total - start) // size)) * num_local
        dataset = tf.data.Dataset.range(num_steps)
        parallel = self.rows.num_parallel_batches(size)
        dataset = dataset.map(batch, num_parallel_calls=parallel, deterministic=True)
        for function in (_with_count(f) if is_counted else f for f in self._functions):
            dataset = dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        if not self._functions and self.is_in_memory:  # tuning and rewriting cannot speed up a gather
            options = tf.data.Options()
            options.autotune.enabled = False
            options.experimental_optimization.apply_default_optimizations = False
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
            arrays = tf.nest.map_structure(tf.convert_to_tensor, self.rows.tensors())
        seed, end = seed if self._seed is None else self._seed, None
        if total is not None:
            last = (-(-total // self.batch_size) - 1) * self.batch_size
            end = sum(map(int, self._batch(last, total)))
        return RowWindows(
            arrays,
            self._functions,
            lambda positions: self._numbers(positions, seed, None)[0],
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
        is_shared = num_replicas > 1 or self._has_varying_shares
        return is_shared and not self._has_equal_shares(start, total, num_replicas)

    def with_varying_shares(self) -> "IndexedData":
        """Returns a copy with counted shares for any number of replicas."""
        return self._copy(_has_varying_shares=True)

    def _has_equal_shares(self, start: int, total: int | None, num_replicas: int) -> bool:
        size = self.batch_size
        num_examples = self.num_examples if self.epochs_apart else (0 if total is None else total - start)
        return not self._has_varying_shares and size % num_replicas == 0 and num_examples % size == 0

    def _numbers(self, positions: Any, seed: int, total: int | None) -> Any:
        """Converts positions below `total`, int64 `[b]`, to numbers and epochs. None: there is no limit."""
        if not self.shuffle and total is not None and total <= self.num_examples:
            return positions, 0
        epochs, offsets = positions // self.num_examples, positions % self.num_examples
        block, num_full = self.rows.block_size, self.num_examples // self.rows.block_size
        if not self.shuffle or num_full <= 1:
            return offsets, epochs
        if block == 1:
            return permuted(offsets, num_full, seed=seed, epochs=epochs), epochs
        blocks = tf.minimum(offsets // block, num_full - 1)
        shuffled = permuted(blocks, num_full, seed=seed, epochs=epochs)
        is_in_last_block = offsets >= num_full * block  # which is short, and stays at the end
        return tf.where(is_in_last_block, offsets, shuffled * block + offsets % block), epochs


def _with_count(function: Callable) -> Callable:
    """Returns `function` for elements (batch, number of real rows)."""

    def mapped(batch: Any, num_real: Any) -> Any:
        is_spread = isinstance(batch, tuple) and not hasattr(batch, "_fields")
        return (function(*batch) if is_spread else function(batch)), num_real

    return mapped
