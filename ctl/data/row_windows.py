"""The rows of the batches to come, for steps that index data on the device themselves.

`ArrayData` says which example stands at which place of the endless order. Here places become windows of
row numbers, a tensor each, made ahead by a thread of tf.data. Each window holds whole batches: it ends
with the rows that the last batch to begin in it needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl.distribute.autograph import converted
from ctl.errors import UsageError

_EPOCHS, _BATCHES, _MOST_ROWS = 4, 128, 1 << 18  # of a window: what it has at least, and at most


@dataclass(frozen=True)
class Segment:
    """Steps that one program can run: batches of one size, whose rows follow each other in a window.

    Attributes:
      window: numbers of examples, int32 `[w]`, or int64 where that is too small.
      first: where in the window the first batch begins.
      steps: number of batches; size: examples in each.
    """

    window: tf.Tensor
    first: int
    steps: int
    size: int


class RowWindows:
    """Segments of the order of examples, one after the other; see `ArrayData.windows`.

    Args:
      arrays: the examples, tensors `[n, ...]`, nested.
      functions: of batches, applied in turn.
      index: (places in the endless order, int64 `[w]`) -> numbers of examples `[w]`.
      start, end: places; end None: endless.
      epochs_apart: no batch holds the end of one epoch and the start of the next.

    Attributes:
      arrays: as given; sizes: of the batches to come, a full one and perhaps a short one.
      iterator: over the windows.
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
        self._size, self._place, self._end, self._apart = batch_size, start, end, epochs_apart
        self._examples = n = int(tf.nest.flatten(arrays)[0].shape[0])
        rows = min(max(_EPOCHS * n, _BATCHES * batch_size), _MOST_ROWS)
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
        whole = n if epochs_apart else None if end is None else end - start
        short = 0 if whole is None else whole % batch_size
        full = whole is None or whole >= batch_size
        self.sizes = (batch_size,) * full + (short,) * bool(short)

    def segments(self, steps: int) -> Any:
        """Yields what makes the next `steps` batches; fewer where the data end."""
        while steps and (found := self._next(steps)) is not None:
            steps -= found.steps
            yield found

    def _next(self, steps: int) -> Segment | None:
        while self._place >= self._window_start + self._stride:
            self._window, self._window_start = next(self.iterator), self._window_start + self._stride
        left = steps * self._size if self._end is None else self._end - self._place
        if self._apart:
            left = min(left, self._examples - self._place % self._examples)
        if left <= 0:
            return None
        here = -(-(self._window_start + self._stride - self._place) // self._size)  # begin in the window
        size = min(left, self._size)
        steps = min(steps, here, left // size)
        found = Segment(self._window, self._place - self._window_start, steps, size)
        self._place += steps * size
        return found

    def check_dtypes(self) -> None:
        """Raises UsageError for examples that XLA cannot hold."""
        bad = [t.dtype.name for t in tf.nest.flatten(self.arrays) if t.dtype in (tf.string, tf.variant)]
        if bad:
            raise UsageError(
                f"jit_compile='loop' with {bad[0]} in train_data: XLA knows numbers only. Make numbers of "
                "them before from_arrays, or write --jit_compile=step."
            )


def batch_of(arrays: Any, rows: Any, functions: Sequence[Callable]) -> Any:
    """Traced: numbers of examples `[b]` -> the batch, after the functions; as tf.data would."""
    batch = tf.nest.map_structure(lambda a: tf.gather(a, rows), arrays)
    for function in map(converted, functions):
        spread = isinstance(batch, tuple) and not hasattr(batch, "_fields")
        made = function(*batch) if spread else function(batch)
        batch = as_tensors(tuple(made) if isinstance(made, list) else made)
    return batch


def refuse(source: str) -> None:
    """Raises UsageError for data that are not in memory."""
    raise UsageError(
        f"jit_compile='loop' needs data in memory, and train_data gives {source}. Return "
        "ctl.from_arrays(arrays, batch_size), or write --jit_compile=step."
    )


@tf.autograph.experimental.do_not_convert
def as_tensors(batch: Any) -> Any:
    """What a function of tf.data returns, as tensors; a list within becomes one tensor."""
    if isinstance(batch, dict):
        return type(batch)((k, as_tensors(v)) for k, v in batch.items())
    if isinstance(batch, tuple):
        parts = [as_tensors(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return tf.convert_to_tensor(batch)
