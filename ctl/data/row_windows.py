"""Row numbers of the next batches, for compiled loops that gather rows on the device.

`IndexedData` defines the example at each position of its endless sequence. Here a thread of tf.data
converts ranges of positions to windows: tensors of row numbers. A window contains complete batches, because
it ends with the rows of the last batch that starts in it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.distribute.autograph import converted
from ctl.errors import UsageError

_MIN_EPOCHS, _MIN_BATCHES, _MAX_ROWS = 4, 128, 1 << 18  # of a window; the maximum has precedence


@dataclass(frozen=True)
class Segment:
    """Consecutive batches of equal size in one window, which one call of a compiled program can run.

    Attributes:
      window: Row numbers `[w]`, int32, or int64 if there are too many rows.
      first: Index in the window of the first row of the first batch.
      steps: Number of batches.
      size: Number of examples in each batch.
    """

    window: tf.Tensor
    first: int
    steps: int
    size: int


class RowWindows:
    """Iteration over segments of the sequence of examples. Created by `IndexedData.windows`.

    Args:
      arrays: The examples, nested tensors `[n, ...]`.
      functions: Functions of batches, applied in turn.
      index: Function (positions, int64 `[w]`) -> row numbers `[w]`.
      batch_size: Number of examples in a full batch.
      start: First position.
      end: Position after the last example. None: endless.
      epochs_apart: True if no batch contains examples of two epochs.

    Attributes:
      arrays: As passed.
      functions: As passed.
      sizes: Sizes of the batches: of a full batch, and of a short one if there is one.
      iterator: Iterator over the windows.
    """

    def __init__(
        self,
        arrays: Any,
        functions: Sequence[Callable],
        index: Callable[[Any], Any],
        batch_size: int,
        *,
        start: int,
        end: int | None,
        epochs_apart: bool,
    ):
        self.arrays, self.functions = arrays, tuple(functions)
        self._size, self._position, self._end, self._epochs_apart = batch_size, start, end, epochs_apart
        self._num_examples = n = int(tf.nest.flatten(arrays)[0].shape[0])
        rows = min(max(_MIN_EPOCHS * n, _MIN_BATCHES * batch_size), _MAX_ROWS)
        self._stride = stride = max(1, rows // batch_size) * batch_size
        self._window_start, self._window = start - stride, None
        dtype = tf.int32 if n < tf.int32.max else tf.int64

        @tf.autograph.experimental.do_not_convert
        def window(first: Any) -> Any:
            return tf.cast(index(first + tf.range(stride + batch_size, dtype=tf.int64)), dtype)

        options = tf.data.Options()
        options.autotune.enabled = False
        firsts = tf.data.Dataset.counter(start, stride, dtype=tf.int64)
        self.iterator = iter(firsts.map(window).prefetch(1).with_options(options))
        length = n if epochs_apart else None if end is None else end - start
        short = 0 if length is None else length % batch_size
        has_full = length is None or length >= batch_size
        self.sizes = (batch_size,) * has_full + (short,) * bool(short)

    def segments(self, steps: int) -> Iterator[Segment]:
        """Yields segments with `steps` batches in total, or fewer at the end of the data."""
        while steps and (segment := self._next(steps)) is not None:
            steps -= segment.steps
            yield segment

    def _next(self, steps: int) -> Segment | None:
        while self._position >= self._window_start + self._stride:
            self._window, self._window_start = next(self.iterator), self._window_start + self._stride
        num_rows = steps * self._size if self._end is None else self._end - self._position
        if self._epochs_apart:
            num_rows = min(num_rows, self._num_examples - self._position % self._num_examples)
        if num_rows <= 0:
            return None
        num_in_window = -(-(self._window_start + self._stride - self._position) // self._size)
        size = min(num_rows, self._size)
        steps = min(steps, num_in_window, num_rows // size)
        segment = Segment(self._window, self._position - self._window_start, steps, size)
        self._position += steps * size
        return segment

    def check_dtypes(self) -> None:
        """Raises UsageError for examples of a dtype that XLA does not support."""
        dtypes = [t.dtype for t in tf.nest.flatten(self.arrays)]
        unsupported = [dtype.name for dtype in dtypes if dtype in (tf.string, tf.variant)]
        if unsupported:
            raise UsageError(
                f"jit_compile='loop' with {unsupported[0]} in train_data: XLA supports numbers only. "
                "Convert the array to numbers before from_arrays, or write --jit_compile=step."
            )


def gather_batch(arrays: Any, rows: Any, functions: Sequence[Callable]) -> Any:
    """Traced: returns the batch of row numbers `[b]` after all functions, as tf.data does."""
    batch = tf.nest.map_structure(lambda a: tf.gather(a, rows), arrays)
    for function in map(converted, functions):
        is_spread = isinstance(batch, tuple) and not hasattr(batch, "_fields")
        result = function(*batch) if is_spread else function(batch)
        batch = as_tensors(tuple(result) if isinstance(result, list) else result)
    return batch


def raise_not_in_memory(source: str) -> None:
    """Raises UsageError for data that are not in memory; `source` describes them."""
    raise UsageError(
        f"jit_compile='loop' requires data in memory, and train_data returns {source}. Return "
        "ctl.from_arrays(arrays, batch_size), or write --jit_compile=step."
    )


@tf.autograph.experimental.do_not_convert
def as_tensors(batch: Any) -> Any:
    """Converts the result of a pipeline function as tf.data does: nested lists become one tensor each."""
    if isinstance(batch, dict):
        return type(batch)((k, as_tensors(v)) for k, v in batch.items())
    if isinstance(batch, tuple):
        parts = [as_tensors(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return tf.convert_to_tensor(batch)
