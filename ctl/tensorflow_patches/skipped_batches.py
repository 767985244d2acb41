"""Batches that each worker skips in a dataset that TensorFlow distributes.

Purpose: A skip before the distribution counts global batches of each worker, and TensorFlow makes one step
  per worker of each of them. A distributed dataset has no method `skip`.
Replaces: `_cloned_datasets` of `tensorflow.python.distribute.input_lib.DistributedDataset` objects.
Versions: TensorFlow 2.16 and later.
Upstream issue: none known.
Switch: `skipped_batches`. Without the patch a resumed run reads the data from the beginning.
"""

from typing import Any

from ctl.tensorflow_patches import switches


def skip_replica_batches(distributed: Any, count: int) -> None:
    """Makes each worker skip its first `count` replica batches. Called before the first iterator."""
    if count and switches.is_enabled("skipped_batches"):
        parts = distributed._cloned_datasets
        distributed._cloned_datasets = [part.skip(count) for part in parts]
