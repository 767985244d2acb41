"""Data that are limited to their first batches: `--overfit_batches` and `--max_eval_batches`.

limited_data = limit_batches(train_data, 2, "train_data")  # a function like train_data
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ctl.data import sources
from ctl.data.arrays import ExampleNumbers
from ctl.data.indexed import IndexedData


def limit_batches(
    make_data: Callable[[int], Any], num_batches: int, name: str, *, is_repeated: bool = True
) -> Callable[[int], Any]:
    """Returns a function like `make_data` for the first batches of its data.

    The examples have the same order in every epoch.

    Args:
      make_data: The user's function (global batch size) -> data.
      num_batches: Number of batches. 0: all, in which case `make_data` is returned.
      name: Name of the user's function, for messages.
      is_repeated: True for data that are read several times: a dataset is kept in memory then, because a
        shuffled one would have other first batches in each epoch.
    """

    def make_limited_data(batch_size: int) -> Any:
        source = sources.as_dataset(make_data(batch_size), name, batch_size, shuffle=False)
        if isinstance(source, IndexedData):
            return source.first_examples(num_batches * source.batch_size)
        if isinstance(source, ExampleNumbers):
            numbers = tf.data.Dataset.range(num_batches * source.batch_size)
            source = numbers.batch(source.batch_size, drop_remainder=True)
        return source.take(num_batches).cache() if is_repeated else source.take(num_batches)

    return make_limited_data if num_batches else make_data


def limit_worker_batches(
    train_data_fn: Callable[[tf.distribute.InputContext], Any], num_batches: int, num_local_replicas: int
) -> Callable[[tf.distribute.InputContext], Any]:
    """Returns a function like `train_data_fn` for the batches of the first steps.

    Args:
      train_data_fn: The user's function (input context) -> dataset of replica batches.
      num_batches: Number of steps. 0: all.
      num_local_replicas: Number of replicas of this worker, which consume one batch each per step.
    """

    def make_limited_data(input_context: tf.distribute.InputContext) -> Any:
        source = train_data_fn(input_context)
        if not isinstance(source, tf.data.Dataset):
            return source  # refused where it is opened
        return source.take(num_batches * num_local_replicas).cache()

    return make_limited_data if num_batches else train_data_fn
