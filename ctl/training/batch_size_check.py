"""Warning about batches that are smaller than the divisor of `average`."""

import logging

from ctl.data.batches import Batches
from ctl.training.loop_length import Interval

_log = logging.getLogger("ctl")


class BatchSizeCheck:
    """Warns once if all batches are smaller than the global batch size, except a last or single batch.

    Args:
      is_disabled: True for a step that divides by the number of rows of each batch.
    """

    def __init__(self, *, is_disabled: bool = False) -> None:
        self._is_complete = is_disabled
        self._num_steps = 0

    def after_log(self, size: int, num_replicas: int, batches: Batches, interval: Interval) -> None:
        """Checks the batches of an interval, after `interval.fetch`. `size` is the global batch size."""
        rows = interval.num_examples() / max(1, interval.steps)
        self._is_complete |= interval.has_full_batches()
        self._num_steps += interval.steps
        has_single_batches = batches.steps_per_epoch is not None and batches.steps_per_epoch < 2
        if self._is_complete or has_single_batches:
            return
        if not batches.has_exact_counts or self._num_steps < 2:
            return
        if num_replicas < rows < size:
            self._is_complete = True
            _log.warning(
                "Batches of train_data held %.1f examples on average, global_batch_size is %d: average() "
                "divides by %d, so gradients are that much smaller. Batch with the batch_size that "
                "train_data is given, after repeat().",
                rows,
                size,
                size,
            )
