"""Data of unknown length, pass by pass: the first pass tells the length.

Each pass begins to iterate over the dataset anew, as `repeat()` does: a shuffle has another order in each
of them, the same ones in a run that is resumed.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from ctl.data.batches import Batches, Passes
from ctl.errors import UsageError

UNKNOWN = math.inf  # `steps_per_epoch`, until the first pass has ended
COUNT_AGAIN = -1  # as batches of a pass: an earlier run has counted batches of another size


def whole_passes(epochs: float | None) -> int:
    """Passes over data of unknown length. Raises UsageError for a part of one."""
    if epochs is None:
        return 1
    if not float(epochs).is_integer():
        raise UsageError(
            f"epochs is {epochs}, and the length of train_data is unknown, so nobody knows where a part of "
            "an epoch ends. Write whole epochs, or return dataset.apply("
            "tf.data.experimental.assert_cardinality(n)) with n batches."
        )
    return int(epochs)


def open_passes(
    source: tf.data.Dataset,
    opened: Callable[[Any, int], Batches],
    *,
    number: int,
    skipped: int,
    known: int | None,
) -> Batches:
    """Opens `number` passes over a source of unknown length, `skipped` batches from their beginning.

    Args:
      opened: (dataset, batches to skip) -> Batches.
      known: batches of a pass, if an earlier run has found out; or COUNT_AGAIN.
    """
    if known == COUNT_AGAIN or (known is not None and skipped >= known and number > 1):
        known = length_of(source)  # shuffles go on as if this run had seen that pass
    if known is not None and skipped >= known and number > 1:
        return _rest(source, opened, number, skipped - known, known)

    def ended(steps: int) -> Batches:
        length = skipped + steps
        if number == 1:
            return dataclasses.replace(first, steps_per_epoch=length, passes=None)
        return _rest(source, opened, number, 0, length)

    first = opened(source, skipped)
    total = None if known is None else max(0, known * number - skipped)
    return dataclasses.replace(
        first, steps_per_epoch=known or UNKNOWN, passes=Passes(ended, total, last=number == 1)
    )


def length_of(source: tf.data.Dataset) -> int:
    """Batches of a dataset that ends, by reading them."""
    return int(source.reduce(np.int64(0), lambda n, *_: n + 1))


def _rest(source: Any, opened: Callable, number: int, skipped: int, length: int) -> Batches:
    """All passes but the first, whose length is known; a shorter one ends the data all the same."""
    rest = opened(source.repeat(number - 1), skipped)
    left = max(0, length * (number - 1) - skipped)
    return dataclasses.replace(rest, steps=left, steps_per_epoch=length)
