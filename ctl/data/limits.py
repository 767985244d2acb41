"""Data that are limited to their first batches: `--overfit_batches` and `--max_eval_batches`.

limited_data = first_batches(train_data, 2, "train_data", repeats=True)  # a function like train_data
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data import pipeline
from ctl.data.arrays import ArrayData, ExampleNumbers


def first_batches(
    make_data: Callable[[int], Any], num_batches: int, name: str, *, repeats: bool
) -> Callable[[int], Any]:
    """Returns a function like `make_data` for the first batches of its data.

    Training on a few batches shows whether a model can learn them. Their examples are kept in memory and
    have the same order in every epoch.

    Args:
      make_data: The user's function (global batch size) -> data.
      num_batches: Number of batches. 0: all, in which case `make_data` is returned.
      name: Name of the user's function, for messages.
      repeats: True to repeat the batches without end.
    """

    def limited(batch_size: int) -> Any:
        source = pipeline.as_source(make_data(batch_size), name, batch_size, shuffle=False)
        if isinstance(source, ArrayData):
            return source.first_examples(num_batches * batch_size)
        if isinstance(source, ExampleNumbers):
            numbers = tf.data.Dataset.range(num_batches * batch_size)
            source = numbers.batch(batch_size, drop_remainder=True)
        return _first_elements(source, num_batches, repeats)

    return limited if num_batches else make_data


def first_batches_of_workers(
    train_data_fn: Callable[[tf.distribute.InputContext], Any],
    num_batches: int,
    num_local_replicas: int,
    *,
    repeats: bool,
) -> Callable[[tf.distribute.InputContext], Any]:
    """Returns a function like `train_data_fn` for the batches of the first steps.

    Args:
      train_data_fn: The user's function (input context) -> dataset of replica batches.
      num_batches: Number of steps. 0: all.
      num_local_replicas: Number of replicas of this worker, which consume one batch each per step.
      repeats: True to repeat the batches without end.
    """

    def limited(input_context: tf.distribute.InputContext) -> Any:
        source = train_data_fn(input_context)
        if not isinstance(source, tf.data.Dataset):
            return source  # refused where it is opened
        return _first_elements(source, num_batches * num_local_replicas, repeats)

    return limited if num_batches else train_data_fn


def _first_elements(dataset: tf.data.Dataset, count: int, repeats: bool) -> tf.data.Dataset:
    dataset = dataset.take(count).cache()
    return dataset.repeat() if repeats else dataset
