"""Checks of the number of rows of batches while they are read."""

from typing import Any

import tensorflow as tf
from ctl.data import dataset_checks
from ctl.distribute.row_partition import num_rows

TOO_MANY_ROWS = "a batch of train_data has more rows than global_batch_size"
UNEQUAL_ROWS = "the components of a batch have unequal numbers of rows"


def rows_checked(
    dataset: tf.data.Dataset, max_rows: int | None, *, num_replicas: int = 1
) -> tf.data.Dataset:
    """Returns the dataset with checks of rows that are not static. They raise when a batch is read.

    On several replicas, which each get some rows of every component, all components must have the same
    number of rows.

    Args:
      dataset: Dataset of batches.
      max_rows: Maximum number of rows of a batch. None: any number.
      num_replicas: Number of replicas that share a batch.
    """
    components = tf.nest.flatten(dataset.element_spec)
    static = [num_rows(spec) for spec in components]
    should_check_max = max_rows is not None and not isinstance(static[0], int)
    should_check_equal = num_replicas > 1 and (None in static or len(set(static)) > 1)
    if not should_check_max and not should_check_equal:
        return dataset

    @tf.autograph.experimental.do_not_convert
    def check(*batch: Any) -> Any:
        counts = [tf.cast(num_rows(part), tf.int64) for part in tf.nest.flatten(joined(batch))]
        checks = []
        if should_check_equal and len(counts) > 1:
            message = f"{UNEQUAL_ROWS} ({dataset_checks.describe_element(dataset.element_spec)})"
            checks.append(tf.debugging.assert_equal(tf.stack(counts[1:]), counts[0], message))
        with tf.control_dependencies(checks):
            limit = tf.constant(max_rows or 0, tf.int64)
        if should_check_max:
            message = f"{TOO_MANY_ROWS} {max_rows}"
            checks.append(tf.debugging.assert_less_equal(counts[0], limit, message))
        with tf.control_dependencies(checks):
            return tf.nest.map_structure(tf.identity, joined(batch), expand_composites=True)

    options = dataset.options()
    return dataset.map(check).with_options(options)


def joined(components: tuple) -> Any:
    """Returns a batch that `Dataset.map` has spread over arguments."""
    return components[0] if len(components) == 1 else components
