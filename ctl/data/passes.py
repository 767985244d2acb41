"""Passes over data of unknown length. The first pass counts the batches.

Each pass starts a new iteration over the dataset, as `repeat()` does. A shuffle has another order in each
pass, and a resumed run repeats these orders.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.batches import Batches, Passes
from ctl.errors import UsageError

UNKNOWN = math.inf  # `steps_per_epoch` until the first pass has ended
COUNT_AGAIN = -1  # batches of a pass, if an earlier run has counted batches of another size


def num_passes(epochs: float | None) -> int:
    """Returns the number of passes over data of unknown length. Raises UsageError for a part of a pass."""
    if epochs is None:
        return 1
    if not float(epochs).is_integer():
        raise UsageError(
            f"epochs is {epochs}, but the length of train_data is unknown, so a fraction of an epoch "
            "cannot be converted to steps. Write whole epochs, or return dataset.apply("
            "tf.data.experimental.assert_cardinality(n)) with n batches."
        )
    return int(epochs)


def open_passes(
    source: tf.data.Dataset,
    open_at: Callable[[Any, int, int], Batches],
    *,
    number: int,
    skipped: int,
    batches_per_pass: int | None,
    must_count: bool = True,
) -> Batches:
    """Opens several passes over a source of unknown length.

    Args:
      source: Dataset of batches.
      open_at: Function (dataset, number of batches before it, number of batches to skip) -> Batches.
      number: Number of passes.
      skipped: Number of batches to skip, from the start of the first pass.
      batches_per_pass: Number of batches, if an earlier run has counted them, or COUNT_AGAIN. None:
        unknown.
      must_count: True to read the first pass again if the position is after it, so that shuffles have the
        orders of the later passes.
    """
    starts_later = batches_per_pass is not None and skipped >= batches_per_pass and number > 1
    if (starts_later and must_count) or batches_per_pass == COUNT_AGAIN:
        batches_per_pass = count_batches(source)  # shuffles continue as if this run had read that pass
    if batches_per_pass is not None and skipped >= batches_per_pass and number > 1:
        return _open_later_passes(source, open_at, number, skipped - batches_per_pass, batches_per_pass)

    def open_next(steps: int) -> Batches:
        length = skipped + steps
        if number == 1:
            return dataclasses.replace(first, steps_per_epoch=length, passes=None)
        return _open_later_passes(source, open_at, number, 0, length)

    first = open_at(source, 0, skipped)
    remaining_steps = None if batches_per_pass is None else max(0, batches_per_pass * number - skipped)
    return dataclasses.replace(
        first,
        steps_per_epoch=batches_per_pass or UNKNOWN,
        passes=Passes(open_next, remaining_steps, is_last=number == 1),
    )


def count_batches(source: tf.data.Dataset) -> int:
    """Reads a finite dataset and returns the number of its batches."""
    return int(source.reduce(np.int64(0), lambda n, *_: n + 1))


def _open_later_passes(source: Any, open_at: Callable, number: int, skipped: int, length: int) -> Batches:
    """Opens all passes after the first one. A pass shorter than `length` batches ends the data earlier."""
    batches = open_at(source.repeat(number - 1), length, skipped)
    remaining_steps = max(0, length * (number - 1) - skipped)
    return dataclasses.replace(batches, steps=remaining_steps, steps_per_epoch=length)
