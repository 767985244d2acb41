"""Warning about batches that are smaller than the divisor of `average`."""

import logging

from ctl.data.batches import Batches
from ctl.training.loop_length import Interval
from ctl.training.trainer_protocol import TrainerProtocol

_log = logging.getLogger("ctl")


class BatchSizeCheck:
    """Warns once if all batches are smaller than the global batch size, except a last or single batch."""

    def __init__(self) -> None:
        self._is_complete = False
        self._num_steps = 0

    def after_log(self, trainer: TrainerProtocol, batches: Batches, interval: Interval) -> None:
        """Checks the batches of an interval, after `interval.fetch`.

        Args:
          trainer: Trainer. Keras divides by the rows of each batch, so its models are not checked.
          batches: Training data.
          interval: Totals of the steps.
        """
        size, rows = trainer.global_batch_size, interval.num_examples() / max(1, interval.steps)
        self._is_complete |= interval.has_full_batches()
        self._num_steps += interval.steps
        has_known_size = batches.examples is not None or batches.steps is not None
        if trainer._rows_may_vary or self._is_complete or has_known_size:
            return
        if not batches.has_exact_counts or self._num_steps < 2:
            return
        if trainer.topology.num_replicas < rows < size:
            self._is_complete = True
            _log.warning(
                "Batches of train_data held %.1f examples on average, global_batch_size is %d: average() "
                "divides by %d, so gradients are that much smaller. Batch with the batch_size that "
                "train_data is given, after repeat().",
                rows,
                size,
                size,
            )
